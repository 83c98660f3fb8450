"""A pass over the data as a map and a sum."""
