"""What `tdpp search` searches or compares: plans, stages of a graph or of a model, shares, runs, a module each."""
