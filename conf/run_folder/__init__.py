"""The names and the line formats of what lies in a run's folder."""
