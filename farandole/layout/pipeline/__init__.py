"""A pipeline at work: stages, micro-batches, and what carries out a schedule."""
