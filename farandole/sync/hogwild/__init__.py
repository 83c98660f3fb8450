"""Hogwild: workers of a host update one shared set of parameters without locks."""
