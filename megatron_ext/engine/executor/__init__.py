"""Executes the actions of a schedule: forward and backward passes, messages, and the time that each takes."""
