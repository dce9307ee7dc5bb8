"""Transformers over tokens: GPT and Llama, BERT, T5."""
