"""The parts of `benchmarks/race_classics.py`.

train        the script that most races run
plan         which races there are: lanes, link, arguments
results      races to JSON and back
figures      the four curves of the literature, drawn from the JSON
text         docs/classics.md, from page.md.jinja and the JSON
theory       the error bound of local SGD, fitted to what was measured
"""
