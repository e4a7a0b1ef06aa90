"""The strategies, and their operations on values: run, reduce, gather, transfer."""
