"""Population-based training: members train side by side, and the worse go on from the better."""
