"""What a run is: configuration groups, their schema and rules, the plan, and the run folder."""
