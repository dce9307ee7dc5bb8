"""Plans in the words of other trainers."""
