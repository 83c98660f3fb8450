"""Stopping in order: signals, agreement on the last step, and the exit code."""
