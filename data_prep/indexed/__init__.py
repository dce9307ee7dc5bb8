"""Indexed data: what is known of them, whether they can be used, what they hold, and others made of them."""
