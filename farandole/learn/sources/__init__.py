"""Where the rows come from, in chunks."""
