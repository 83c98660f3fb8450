"""What is particular to tensors on GPUs, whatever carries them."""
