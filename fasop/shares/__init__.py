"""Replicas that take unequal shares of a batch, as IIDP and JABAS choose them: their files and their model."""
