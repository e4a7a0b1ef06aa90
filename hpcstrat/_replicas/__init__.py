"""Who computes: the group of replicas of a strategy, and the context that a thread is in."""
