"""Charts, pictures and the frame of a page."""
