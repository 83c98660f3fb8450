"""Where to cut a model into stages: its blocks, what they cost, and the search for the best cut."""
