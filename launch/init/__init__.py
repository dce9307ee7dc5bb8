"""What `tdpp init` finds out, and the files that it writes from that."""
