"""Where agents are started: on this machine, on hosts that ssh reaches, and in Slurm jobs."""
