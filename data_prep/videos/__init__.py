"""Videos, as numbers that describe their frames, and captions: from a folder of one's own, or drawn."""
