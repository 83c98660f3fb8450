"""Watches over a job: workers that make no progress, and workers that hold up its end."""
