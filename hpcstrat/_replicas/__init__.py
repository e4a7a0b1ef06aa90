"""The replicas of a strategy, and the context that a line of the program runs in."""
