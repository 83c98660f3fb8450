"""Synchronous training whose workers come and go: losses are repaired, newcomers are let in."""
