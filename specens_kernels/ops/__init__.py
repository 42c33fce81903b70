"""The rooms: one folder an operation."""
