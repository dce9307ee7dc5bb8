"""The best plans of a cluster: what is tried, in which order, and what no plan can beat."""
