"""Messages between two ranks: labelled mail, the links that carry it, and its payload."""
