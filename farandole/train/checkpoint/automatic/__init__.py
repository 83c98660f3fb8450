"""Checkpoints on the way: when a run saves by itself, and which of its checkpoints it keeps."""
