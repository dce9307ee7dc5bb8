"""What `tdpp init` does with the files that it writes, and its form that writes a model."""
