"""What to measure, one file an operation."""
