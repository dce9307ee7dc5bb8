"""Families that learn the classes of images."""
