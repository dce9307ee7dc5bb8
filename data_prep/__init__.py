"""From text to the indexed data that Megatron-LM and the engine read."""
