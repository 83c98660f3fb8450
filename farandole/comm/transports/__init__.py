"""What carries the bytes: threads of one process, shared memory, c10d, MPI, and hosts of these."""
