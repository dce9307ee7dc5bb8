"""What runs on each node of a run: the agent and all that it keeps and leaves."""
