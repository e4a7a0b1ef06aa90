"""Storage of variables: one copy for all ranks (central) or per rank (mirrored), on host or GPU."""
