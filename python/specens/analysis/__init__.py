"""Comparisons, measurements, plans, and pages that show them."""
