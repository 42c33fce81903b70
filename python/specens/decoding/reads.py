"""Reads of several requests together: the one place where engines are called for logits."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specens.decoding.reader import Reader
from specens.engines.checks import read_logits
from specens.engines.protocol import Read


def read(reader: Reader, tokens: Sequence[int], num_rows: int, parents: Sequence[int] = ()) -> list[Tensor]:
    """Logits [num_rows, vocab] of each text of one reader, as of `read_together`.

    Raises ValueError where the engine has no embedding for a token.
    """
    reader.check(tokens)
    return read_together([reader], [tokens], [num_rows], [parents])[0]


@dataclass
class _Part:
    """What one reader is to read: generated tokens, and nodes after them."""

    reader: Reader
    sequence: Sequence[int]
    nodes: Sequence[int]
    parents: Sequence[int]
    num_rows: int
    length: int


def read_together(
    readers: Sequence[Reader],
    tokens: Sequence[Sequence[int]],
    num_rows: Sequence[int],
    parents: Sequence[Sequence[int]],
) -> list[list[Tensor]]:
    """Of each of some readers of one context, the logits [num_rows, vocab] of its texts: of all from one `read`.

    tokens: all generated tokens and drafts of each. parents: of the drafts, where they are or may become the nodes of a
    tree: -1 for the last token before them. Trees are read path by path where the engine does not hold them.
    """
    found: dict[int, list[Tensor]] = {}
    parts: dict[int, _Part] = {}
    for index, (reader, own, above, rows) in enumerate(zip(readers, tokens, parents, num_rows, strict=True)):
        if above:
            split = len(own) - len(above)
            is_chain = list(above) == list(range(-1, len(above) - 1))
            if not is_chain and reader.num_read > split:  # drafts that it has as a chain, of which a tree became
                reader.roll_back(split)
            if reader.num_read > split or not reader.holds_tree(len(own)):
                if not is_chain:
                    found[index] = _read_paths(reader, own[:split], own[split:], above, rows)
                    continue
                if reader.num_nodes:  # held as a tree as long as it was smaller
                    reader.roll_back(split)
                above = ()  # a chain is read as one, and may stay
        sequence, nodes = (own[:split], own[split:]) if above else (own, ())
        parts[index] = _Part(reader, sequence, nodes, above, rows, len(own))
    found |= dict(zip(parts, _read(list(parts.values())), strict=True))
    return [found[index] for index in range(len(readers))]


def _read(parts: list[_Part]) -> list[list[Tensor]]:
    known = [part.reader.known(part.length, part.num_rows) for part in parts]
    reads: list[Read] = []
    read_parts = [part for part, (rows, _) in zip(parts, known, strict=True) if part.num_rows > bool(rows)]
    for part, (rows, _) in zip(parts, known, strict=True):
        if wanted := part.num_rows - bool(rows):
            for text in part.reader.texts:
                reads.append(Read(text, part.sequence, wanted, part.nodes, part.parents))
    logits, hidden = _forward(read_parts, reads) if reads else ([], [])
    found, first = [], 0
    for part, (rows, states) in zip(parts, known, strict=True):
        last = first + len(part.reader.texts) if part.num_rows > bool(rows) else first
        all_rows, all_states = logits[first:last], hidden[first:last]
        if rows:
            all_rows, all_states = _joined(rows, all_rows), _joined(states, all_states)
        part.reader.keep(part.length - len(part.nodes), len(part.nodes), all_rows, all_states)
        found.append(all_rows)
        first = last
    return found


def _forward(parts: Sequence[_Part], reads: Sequence[Read]) -> tuple[list[Tensor], Sequence[Tensor]]:
    """What the context gives, and the forwards of it booked."""
    context, started = parts[0].reader.context, time.perf_counter()
    logits = read_logits(context, reads)
    seconds = time.perf_counter() - started
    forwards = [
        (dict(zip(map(id, forward.texts), forward.num_tokens, strict=True)), forward.seconds)
        for forward in context.forwards
    ]
    if not forwards:  # all of it was one
        forwards.append((dict([new for part in parts for new in part.reader.num_new(part.length)]), seconds))
    for tokens, spent in forwards:
        for part in parts:
            part.reader.count(tokens, spent)
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
