"""What is trained: the interface of a task, what a stage holds of one, and the families of models."""
