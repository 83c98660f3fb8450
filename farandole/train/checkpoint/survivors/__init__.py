"""What the survivors of a lost worker leave, and how the next attempt makes a checkpoint of it."""
