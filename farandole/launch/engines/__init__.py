"""The engines of `farandole run --on`: which there are, and what each is told."""
