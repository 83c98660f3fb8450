"""Benchmarks behind `farandole bench`: communication and synthetic training."""
