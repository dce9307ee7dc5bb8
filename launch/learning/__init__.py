"""Which plans a rehearsal of learning compares, what it trains of them, and what came of it."""
