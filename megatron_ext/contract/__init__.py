"""What crosses rooms, defined once: plan, schedules and their proof, errors. Python 3.8, standard library only."""
