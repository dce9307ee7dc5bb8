"""How long the parts of a model and messages take on this machine."""
