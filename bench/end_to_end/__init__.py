"""Whole engines, with and without the operations."""
