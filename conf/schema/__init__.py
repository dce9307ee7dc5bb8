"""The typed shape of an experiment, and the rules that hold between its keys."""
