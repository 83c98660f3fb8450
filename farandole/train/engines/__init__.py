"""What carries out a trainer's step, for each kind of layout."""
