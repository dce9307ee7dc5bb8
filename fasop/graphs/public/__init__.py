"""The answers of PipeDream's public optimizer, with its cost model and what is odd about it."""
