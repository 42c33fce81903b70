"""Launches without data, by operation: every variant of a kernel that is compiled ahead of time."""
