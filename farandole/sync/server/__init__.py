"""Strategies that keep the model on parameter servers."""
