"""Races: the same script under several schemes, one lane after another."""
