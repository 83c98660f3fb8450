"""Local steps with averages of the models in between."""
