"""The machines of a cluster over all runs."""
