"""Take back what a rejected draft left in a model's cache: cut in place, or put an earlier state back.

Of the cache layers of transformers, those that keep a key for each token are cut. Layers that fold all tokens into one
state (Mamba, gated delta, convolutions) and layers that quantise several tokens together cannot be cut without a trace:
their state is noted after each forward, and after a rejection the newest one that holds settled tokens only comes back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from specens_kernels import compact_kv
from specens_kernels.backend import backend_for

TREE_LAYERS = ("DynamicLayer", "StaticLayer", "DynamicSlidingWindowLayer", "DummyLayer")


class Rollback:
    """Undoes the last tokens of one cache.

    by_snapshots: whether it returns to noted states, so that tokens after the newest one must be fed again.
    Raises ValueError with the names of the cache's classes where a layer can neither be cut nor noted.
    """

    def __init__(self, cache: Any) -> None:
        _check(cache)
        self._cache = cache
        self._snapshots: list[tuple[int, list[dict[str, Any]]]] = []  # the number of tokens, the state of each layer
        self.by_snapshots = any(map(_needs_snapshots, cache.layers))
        for layer in self._cut_layers():
            if hasattr(layer, "activate_past_recording"):  # sliding windows then keep what a rejection needs again
                layer.activate_past_recording()

    def note(self, num_tokens: int) -> None:
        """Remember the state after `num_tokens` tokens; call it after every forward."""
        if self.by_snapshots:
            self._snapshots.append((num_tokens, [_copy(vars(layer)) for layer in self._snapshot_layers()]))

    def undo(self, num_tokens: int, length: int) -> int:
        """Forget all but the first `length` of `num_tokens` tokens, which are settled; return how many are left.

        Fewer than `length` where the state was not noted there. A sliding window forgets what is out of its reach.
        """
        left = min(num_tokens, length)
        if self.by_snapshots:
            self._snapshots = [snapshot for snapshot in self._snapshots if snapshot[0] <= length]
            self.settle(length)
            left, states = self._snapshots[0]
            if left < num_tokens:
                self._put_back(states)
        for layer in self._cut_layers():
            if num_tokens > left or hasattr(layer, "activate_past_recording"):
                layer.crop(left - num_tokens)
        return left

    def settle(self, length: int) -> None:
        """Forget how to return to fewer tokens than `length`, the settled ones."""
        while len(self._snapshots) > 1 and self._snapshots[1][0] <= length:
            del self._snapshots[0]

    def _put_back(self, states: Sequence[dict[str, Any]]) -> None:
        for layer, state in zip(self._snapshot_layers(), states, strict=True):
            vars(layer).update(_copy(state))  # a copy, since the same state may have to come back again

    def _cut_layers(self) -> Iterable[Any]:
        return (layer for layer in self._cache.layers if not _needs_snapshots(layer))

    def _snapshot_layers(self) -> Iterable[Any]:
        return (layer for layer in self._cache.layers if _needs_snapshots(layer))


def check_capacity(cache: Any, num_tokens: int) -> None:
    """Raise ValueError where the cache has a fixed number of slots, and less than `num_tokens`."""
    for layer in cache.layers:
        slots = getattr(layer, "max_cache_len", None)
        if slots is not None and _can_cut(layer) and slots < num_tokens:
            raise ValueError(
                f"max_new_tokens: expected prompt, new tokens and drafts to fit into the {slots} slots of "
                f"{type(cache).__name__}, got {num_tokens}"
            )


def holds_trees(cache: Any, num_tokens: int = 0) -> bool:
    """Whether the cache can hold a draft tree after a text, `num_tokens` slots in all."""
    windows = [layer.sliding_window for layer in cache.layers if hasattr(layer, "sliding_window")]
    return (
        all(type(layer).__name__ in TREE_LAYERS for layer in cache.layers)
        and min(windows, default=num_tokens + 1) > num_tokens
    )


def keep_slots(cache: Any, start: int, nodes: Sequence[int]) -> None:
    """Move the keys and values of nodes, which lie from the slot `start` on, and ascend, there one after the other."""
    layers = [layer for layer in cache.layers if layer.keys is not None]
    move_slots([states for layer in layers for states in (layer.keys, layer.values)], start, nodes)


def move_slots(caches: Sequence[Tensor], start: int, nodes: Sequence[int]) -> None:
    """The same of buffers [1, heads, slots, head_dim], which keep their address."""
    if caches and list(nodes) != list(range(len(nodes))):
        path = torch.tensor([list(nodes)], device=caches[0].device)
        compact_kv(caches, path, torch.tensor([start], device=path.device), backend=backend_for("compact_kv", path))


def _check(cache: Any) -> None:
    stuck = sorted(
        {type(layer).__name__ for layer in cache.layers if not _needs_snapshots(layer) and not _can_cut(layer)}
    )
    if stuck or not hasattr(cache, "crop"):
        layers = f" with layers {', '.join(stuck)}" if stuck else ""
        raise ValueError(
            f"members: the cache class {type(cache).__name__}{layers} cannot be rolled back; use schedule='standard'"
        )


def _needs_snapshots(layer: Any) -> bool:
    """Of a state that grows by assignment; a layer with a static buffer besides is written in place, so not noted."""
    folds = hasattr(layer, "recurrent_states") or hasattr(layer, "_quantized_keys")
    return folds and not hasattr(layer, "max_cache_len")


def _can_cut(layer: Any) -> bool:
    """Older releases of transformers do not say; there only the plain layer is known to be cut without a trace."""
    if hasattr(layer, "recurrent_states"):
        return False
    return getattr(layer, "is_croppable", type(layer).__name__ == "DynamicLayer")


def _copy(state: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a layer. Recurrent states, in dicts, are written in place; all else is assigned anew."""
    return {name: _clone_values(value) if isinstance(value, dict) else value for name, value in state.items()}


def _clone_values(states: dict[int, Any]) -> dict[int, Any]:
    return {index: state.clone() if isinstance(state, Tensor) else state for index, state in states.items()}
