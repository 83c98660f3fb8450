"""Choices that a script leaves open: `run.choose`, and who decides."""
