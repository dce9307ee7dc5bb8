"""From a run's files, its processes and Slurm's answers to what can be seen of it at one moment."""
