"""The engine and its contenders on one GPU: `prepare` needs all of tdpp, everything else torch and numpy alone."""
