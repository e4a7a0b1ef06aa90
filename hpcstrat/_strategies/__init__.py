"""The strategies, and what they do with values: run, reduce, gather, transfer."""
