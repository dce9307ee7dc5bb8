"""What a rank records of itself: events, memory, progress."""
