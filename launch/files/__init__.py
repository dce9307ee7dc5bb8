"""What a run's agents, workers and launcher write, typed; whose it is, and who is launching it; files of commands."""
