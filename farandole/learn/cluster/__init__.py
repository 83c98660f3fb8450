"""Clustering."""
