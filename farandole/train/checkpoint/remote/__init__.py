"""Checkpoints in object stores, through fsspec."""
