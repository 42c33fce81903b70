"""What to measure, one file a room."""
