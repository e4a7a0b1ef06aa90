"""`hpcstrat run`: one program on several ranks, started by the MPI's own mpiexec."""
