"""What a search looks at: sizes, node orders and sets of nodes."""
