"""Mixtures of normal distributions."""
