"""What trained translation models do in one process, with torch alone, and `tokenizers` where it is installed."""
