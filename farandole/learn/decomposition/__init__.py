"""Directions of large variance."""
