"""Triton helpers that several rooms share. They compute; they never launch."""
