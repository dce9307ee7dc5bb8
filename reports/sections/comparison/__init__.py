"""Sections of the page of several runs, each there only where the runs have what it shows."""
