"""The parts of `benchmarks/learn.py`: data, sides of the comparison, memory, growth."""
