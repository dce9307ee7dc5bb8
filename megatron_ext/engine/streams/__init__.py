"""Stages that train without a flush: their steps, versions of their weights, and what they have to learn."""
