"""What a model is, in numbers: its configuration, parameters and activations."""
