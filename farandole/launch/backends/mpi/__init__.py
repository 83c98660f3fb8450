"""Open MPI's mpirun, which starts all ranks of a job itself."""
