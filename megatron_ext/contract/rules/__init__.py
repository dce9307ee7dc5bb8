"""What the values of plan.json have to do with each other, by what they are about."""
