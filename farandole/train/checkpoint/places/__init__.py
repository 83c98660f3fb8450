"""Where checkpoints go and come from: folders and object stores behind one interface."""
