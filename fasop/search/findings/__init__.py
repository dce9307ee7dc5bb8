"""What a search says of its result: in words, of idle GPUs, of a run's own plan, and where nothing was found."""
