"""Plans whose stages differ in replicas or tensor sizes: which there are, what they take at least, the best."""
