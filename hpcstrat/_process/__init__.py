"""This process among others: how it was started, MPI, its streams, how it fails and ends."""
