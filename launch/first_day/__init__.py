"""What a new user's first files are written from: what Slurm and the nodes say, and other programs' models."""
