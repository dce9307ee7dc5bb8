"""Weights in the formats of Hugging Face's transformers and of Megatron-Core."""
