"""What a job does when a worker fails: stop all, go on without it, or start again without it."""
