"""What a run's events say: waits, shares of time, figures."""
