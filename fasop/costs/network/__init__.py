"""Which ranks lie on which nodes, and how fast the links between them are."""
