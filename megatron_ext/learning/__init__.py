"""What a model learns under a plan, in one process and without the plan's ranks."""
