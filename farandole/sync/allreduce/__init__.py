"""Averaging gradients in every step, at once or one step late."""
