"""A thread on every rank, which ends the job if the ranks would wait for each other forever."""
