"""Matches the collectives that ranks request by name, and carries them out."""
