"""How long an iteration takes: schedules replayed with given times, one plan or thousands at once."""
