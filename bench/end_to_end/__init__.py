"""Whole generations, timed in tokens per second: each module is a program, `python -m bench.end_to_end.NAME`."""
