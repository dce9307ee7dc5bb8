"""Plans, predictions and their accuracy as tables for people and programs."""
