"""Reading what runs logged, ranking them, and drawing the report of a race.

Nothing is imported here: a worker needs `metrics` alone, and the page needs matplotlib, which takes
a second.
"""
