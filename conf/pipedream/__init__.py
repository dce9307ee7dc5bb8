"""PipeDream's own files: the configuration of its driver, and the stages and ranks of a model, read and written."""
