"""Tiles as tensors: who owns which part, and which functions can be computed part by part."""
