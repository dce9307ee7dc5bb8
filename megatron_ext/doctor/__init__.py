"""Looks at one node of a run, and at its ways to the others."""
