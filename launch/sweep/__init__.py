"""Several experiments of one command line, or one: checked and counted together, started one by one, reported."""
