"""`tdpp data pairs`: sentences in two languages, side by side, from what people have them in."""
