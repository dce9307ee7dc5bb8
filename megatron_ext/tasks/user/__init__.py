"""What a user's own file leads to: a module cut into blocks, or a task."""
