"""In place of Megatron-LM's training loop, on megatron.core as it is installed."""
