"""A run, a race or any folder of runs on a page that lives while they run."""
