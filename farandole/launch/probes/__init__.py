"""Asks other hosts about themselves before a job starts there: versions, files, clocks, links."""
