"""The best stages by tdpp's own search: on contiguous ranks of real nodes, or nested in the levels of a network."""
