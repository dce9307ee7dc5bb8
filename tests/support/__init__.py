"""Not tests, but what tests share: doubles, stand-ins, made-up runs and a Slurm cluster, by the room they are for."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The clone."""
PATIENCE_S = 300.0
"""Until a test gives up what has not come: on a busy machine everything takes twenty times as long."""
