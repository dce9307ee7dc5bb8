"""From an experiment to its plan, and all that can be found wrong before anything is started."""
