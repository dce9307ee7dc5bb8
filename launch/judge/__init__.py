"""From the files of a run to a verdict and its evidence."""
