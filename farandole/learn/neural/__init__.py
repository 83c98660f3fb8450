"""Small neural networks."""
