"""What the commands about runs share: their arguments, which runs are listed, colours, and what runs left behind."""
