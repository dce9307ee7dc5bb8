"""Profiles: what was measured on a type of GPU, its rules, its files, and its text."""
