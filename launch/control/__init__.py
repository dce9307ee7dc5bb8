"""From an experiment to a run that is started, followed and stopped."""
