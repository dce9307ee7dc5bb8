"""How many layers each stage gets: heuristics, local search, bounds and proofs; and which share of a batch, exactly."""
