"""Whole trainings whose batch adapts, played on many sets of nodes before a GPU is booked."""
