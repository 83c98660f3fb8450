"""A model's forward as a graph, with proof that the graph loses nothing of the model's code."""
