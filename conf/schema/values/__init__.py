"""The values that keys take: words and numbers, each with its smallest and largest, parsed and checked once."""
