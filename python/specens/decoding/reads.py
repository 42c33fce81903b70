"""Reads of several requests together: the one place where engines are called for logits."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specens.decoding.reader import NOTHING, Known, Reader
from specens.engines.checks import read_logits
from specens.engines.protocol import Read


def read(reader: Reader, tokens: Sequence[int], num_rows: int, parents: Sequence[int] = ()) -> list[Tensor]:
    """Logits [num_rows, vocab] of each text of one reader, as of `read_together`.

    Raises ValueError where the engine has no embedding for a token.
    """
    reader.check(tokens)
    return read_together([Ask(reader, tokens, len(tokens), num_rows, parents)])[0]


@dataclass
class Ask:
    """What one reader is to read, and the rows of logits that are wanted, of which the last is after the last token.

    tokens: all generated tokens and drafts, length: how many. parents: of the drafts, where they are or may become the
    nodes of a tree: -1 for the last token before them. owner: whose reader it is. known: the first of the rows, where
    it needs no forward. num_new: tokens and nodes that it has not read. logits: all rows, once they are there.
    """

    reader: Reader
    tokens: Sequence[int]
    length: int
    num_rows: int
    parents: Sequence[int] = ()
    owner: Any = None
    known: Known = NOTHING
    num_new: int = 0
    logits: list[Tensor] | None = None


def read_together(asked: Sequence[Ask]) -> list[list[Tensor]]:
    """Of each of some readers of one context, the logits [num_rows, vocab] of its texts: of all from one `read`.

    Trees are read path by path where the engine does not hold them.
    """
    reads: list[Read] = []
    reading: list[Ask] = []
    for own in asked:
        if own.parents:
            _read_where_not_held(own)
        if own.logits is not None:
            continue
        reader, tokens = own.reader, own.tokens
        nodes: Sequence[int] = ()
        own.num_new = own.length - reader.num_read - reader.num_nodes
        if own.num_rows > own.num_new:
            own.known = reader.known()
        if wanted := own.num_rows - bool(own.known[0]):
            if own.parents:
                split = own.length - len(own.parents)
                tokens, nodes = tokens[:split], tokens[split:]
            reading.append(own)
            for text in reader.texts:
                reads.append(Read(text, tokens, wanted, nodes, own.parents))
    logits, hidden = _forward(reading, reads) if reads else ([], ())
    found, first = [], 0
    for own in asked:
        if own.logits is None:
            rows, states = own.known
            last = first + own.reader.num_texts if own.num_rows > bool(rows) else first
            own.logits, all_states = logits[first:last], hidden[first:last]
            if rows:
                own.logits, all_states = _joined(rows, own.logits), _joined(states, all_states)
            num_nodes = len(own.parents) if own.parents else 0
            own.reader.keep(own.length - num_nodes, num_nodes, own.logits, all_states)
            first = last
        found.append(own.logits)
    return found


def _read_where_not_held(own: Ask) -> None:
    """Read a tree path by path where the engine does not hold it; a chain is read as one then."""
    reader, split = own.reader, own.length - len(own.parents)
    is_chain = list(own.parents) == list(range(-1, len(own.parents) - 1))
    if not is_chain and reader.num_read > split:  # drafts that it has as a chain, of which a tree became
        reader.roll_back(split)
    if reader.num_read > split or not reader.holds_tree(own.length):
        if not is_chain:
            own.logits = _read_paths(reader, own.tokens[:split], own.tokens[split:], own.parents, own.num_rows)
            return
        if reader.num_nodes:  # held as a tree as long as it was smaller
            reader.roll_back(split)
        own.parents = ()  # its drafts may stay as tokens


def _forward(asked: Sequence[Ask], reads: Sequence[Read]) -> tuple[list[Tensor], Sequence[Tensor]]:
    """What the context gives, and the forwards of it booked."""
    context, started = asked[0].reader.context, time.perf_counter()
    logits = read_logits(context, reads)
    seconds = time.perf_counter() - started
    forwards = [
        (dict(zip(map(id, forward.texts), forward.num_tokens, strict=True)), forward.seconds)
        for forward in context.forwards
    ]
    if not forwards:  # all of it was one
        forwards = [
            ({key: own.num_new + unread for own in asked for key, unread in own.reader.unread.items()}, seconds)
        ]
    for tokens, spent in forwards:
        part = spent / (len(tokens) or 1)  # an engine may tell of one without texts
        for own in asked:
            own.reader.count(tokens, part)
    return logits, context.hidden or ()


def _joined(first: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """The rows of each text, of which the first comes from elsewhere."""
    if not others:
        return [row[None] for row in first]
    return [torch.cat([row[None], rows]) for row, rows in zip(first, others, strict=True)]


def _read_paths(
    reader: Reader, settled: Sequence[int], nodes: Sequence[int], parents: Sequence[int], num_rows: int
) -> list[Tensor]:
    """The last rows of a tree from chains, each of which is rolled back."""
    if reader.num_read > len(settled) or reader.num_nodes:
        reader.roll_back(len(settled))
    first = len(nodes) - num_rows  # the rows of nodes from here on are wanted; -1: that after the settled tokens too
    found: dict[int, list[tuple[Tensor, ...]]] = {}
    root: list[list[int]] = [[]]  # the path to no node
    for path in root[first >= 0 :] + _paths_to_read(parents, max(first, 0)):
        new = [node for node in path if node >= first] or [-1]
        logits = read(reader, [*settled, *(nodes[node] for node in path)], len(new))
        pairs = list(zip(logits, reader.hidden)) if reader.hidden else [(rows,) for rows in logits]
        found |= {node: [tuple(rows[row] for rows in pair) for pair in pairs] for row, node in enumerate(new)}
        if path:
            reader.roll_back(len(settled))
    columns = [[torch.stack(rows) for rows in zip(*own)] for own in zip(*(found[node] for node in sorted(found)))]
    reader.hidden = [own[1] for own in columns] if reader.hidden else ()
    return [own[0] for own in columns]


def _paths_to_read(parents: Sequence[int], first: int) -> list[list[int]]:
    """Paths from the root to nodes, which end at a leaf and together hold all nodes from `first` on."""
    inner = set(parents)
    paths = []
    for leaf in (node for node in range(first, len(parents)) if node not in inner):
        path, node = [], leaf
        while node >= 0:
            path.append(node)
            node = parents[node]
        paths.append(path[::-1])
    return paths
