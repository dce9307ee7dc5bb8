"""What no plan beats: bounds of sizes in any node order, of node orders, and of what plans exchange."""
