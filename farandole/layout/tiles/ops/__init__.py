"""How each family of functions is computed on tiles."""
