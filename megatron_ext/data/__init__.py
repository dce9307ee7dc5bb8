"""Training samples from Megatron's indexed datasets."""
