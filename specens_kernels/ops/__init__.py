"""The operations, one folder each."""
