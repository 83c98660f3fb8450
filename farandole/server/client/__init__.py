"""The worker's side of the parameter servers."""
