"""Exact spatial parallelism: every rank computes a tile of the image, through unchanged models."""
