"""How a plan divides its batch: micro-batch sizes, and shares of unlike replicas."""
