"""Any model as a graph of operators with measured times, and its best division into stages (PipeDream, SOSP 2019)."""
