"""How a model can be read: what its forwards and its cache can do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reading:
    """What a model can do so that its logits stay those of `generate`, as probing finds out by trying.

    caches: it keeps what it has read; else every forward reads the whole text.
    several: a forward of several tokens gives the logits after each of them.
    rolls_back: what it keeps goes back to fewer tokens; else the text is read anew after a rejection.
    shares: texts that each have a length of their own are read together, in one ragged cache.
    trees: a forward reads the nodes of a draft tree.
    """

    caches: bool = True
    several: bool = True
    rolls_back: bool = True
    shares: bool = True
    trees: bool = True
