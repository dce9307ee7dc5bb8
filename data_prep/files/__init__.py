"""Files of any size, read piece by piece, with progress, on as many processes as there are."""
