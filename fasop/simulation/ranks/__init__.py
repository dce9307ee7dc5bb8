"""Plans whose ranks differ, rank by rank: replicas, shares, stages, and the replay of any schedule."""
