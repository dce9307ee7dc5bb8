"""What no plan of a layout beats, on one node order or on all: of many layouts at once, or of one more closely."""
