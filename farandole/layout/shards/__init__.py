"""Tensors of which every rank has other samples: shares of the batch behind the tiles."""
