"""Prompts and texts in files, of which none is lost when a run is ended."""
