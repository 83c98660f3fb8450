"""Tuning: many trials of one script, each with other choices, and what is found by them."""
