"""What `tdpp init` does with the files that it writes."""
