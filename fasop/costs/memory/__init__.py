"""What ranks hold in the memory of their GPUs and hosts."""
