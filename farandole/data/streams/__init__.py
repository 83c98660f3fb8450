"""Iterable datasets, whose length nobody knows in advance."""
