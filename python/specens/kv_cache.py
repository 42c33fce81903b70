"""Undo what a rejected draft left in a key-value cache: cut in place, never recomputed."""

from __future__ import annotations

from typing import Any


def prepare_roll_back(cache: Any) -> None:
    """Check that a fresh cache can be rolled back, and let layers that forget (sliding windows) keep what that needs.

    Raises ValueError with the names of the cache's classes where it cannot: a recurrent state, for example, holds
    every token that it ever saw.
    """
    stuck = sorted({type(layer).__name__ for layer in cache.layers if not _can_crop(layer)})
    if stuck or not hasattr(cache, "crop"):
        layers = f" with layers {', '.join(stuck)}" if stuck else ""
        raise ValueError(
            f"members: the cache class {type(cache).__name__}{layers} cannot be rolled back; use schedule='standard'"
        )
    if _records_past(cache):
        cache.activate_past_recording()


def roll_back(cache: Any, num_tokens: int) -> None:
    """Remove the last `num_tokens` positions; what stays is settled, and a sliding window may forget it again."""
    if num_tokens > 0 or _records_past(cache):
        cache.crop(-num_tokens)


def _records_past(cache: Any) -> bool:
    return hasattr(cache, "activate_past_recording")


def _can_crop(layer: Any) -> bool:
    """Older releases of transformers do not say; there only the plain layer is known to be cut without a trace."""
    return getattr(layer, "is_croppable", type(layer).__name__ == "DynamicLayer")
