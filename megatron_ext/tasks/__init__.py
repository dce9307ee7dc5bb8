"""What is trained: models in blocks."""
