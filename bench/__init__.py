"""Benchmarks of the operations: `python -m bench` lists them, `python -m bench NAME` checks one and times it."""
