"""How a node of an elastic run goes on: with other nodes, when some are lost or others are chosen after an epoch."""
