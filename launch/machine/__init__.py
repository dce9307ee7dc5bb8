"""The outside world: processes, GPUs, Slurm's commands, containers."""
