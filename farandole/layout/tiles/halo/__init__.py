"""What tiles need of their neighbours: borders, exchanges, and fusing them."""
