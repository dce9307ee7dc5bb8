"""`tdpp data images`: images and their classes, packed into arrays, from folders, tar files and arrays."""
