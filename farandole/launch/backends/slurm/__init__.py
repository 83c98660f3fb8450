"""Slurm: batch jobs that resume after preemption, and other nodes of an allocation by srun."""
