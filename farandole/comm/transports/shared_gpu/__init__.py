"""Ranks that share a GPU: sums in its own memory."""
