"""Checkpoints: what they hold, how ranks save them together, and how a run resumes."""
