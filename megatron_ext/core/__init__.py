"""The engine `megatron_core`: megatron.core's model, schedules and optimizer in the place of tdpp's own."""
