"""What the doctor finds on nodes and links, judged."""
