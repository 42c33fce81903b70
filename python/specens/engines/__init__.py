"""Who runs the members."""
