"""Why an iteration takes as long as it does: the graph of its events, its critical path, what changes would bring."""
