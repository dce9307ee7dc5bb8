"""`tdpp data prepare`: indexed data from a source of text, resumed where it was interrupted."""
