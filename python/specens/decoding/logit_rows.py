"""Logits at consecutive positions, as they come from forwards."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


class LogitRows:
    """Logits of one model at the positions from `start` to `end` - 1 of a text.

    A stretch that came from one forward is handed out as a view of what the model returned.
    """

    def __init__(self) -> None:
        self.start = 0
        self.end = 0
        self._parts: list[Tensor] = []  # [rows, vocab]

    def add(self, position: int, rows: Tensor) -> None:
        """Append rows [n, vocab] at `position` and after it, which is where the others end, unless there are none."""
        assert not self._parts or position == self.end
        if not self._parts:
            self.start = self.end = position
        self._parts.append(rows)
        self.end += rows.shape[0]

    def take(self, start: int, end: int) -> Tensor:
        """Logits [end - start, vocab] of these positions, all of which are here."""
        return joined(self.pieces(start, end))

    def pieces(self, start: int, end: int) -> list[Tensor]:
        """The same in pieces [n, vocab], each a view of what one forward returned."""
        assert self.start <= start < end <= self.end
        found, first = [], self.start
        for part in self._parts:
            last = first + part.shape[0]
            if start <= first and last <= end:
                found.append(part)
            elif first < end and start < last:
                found.append(part[max(start - first, 0) : end - first])
            first = last
        return found

    def forget_before(self, position: int) -> None:
        """Drop the rows of earlier positions."""
        while self._parts and self.start + self._parts[0].shape[0] <= position:
            self.start += len(self._parts.pop(0))
        if self._parts and self.start < position:
            self._parts[0] = self._parts[0][position - self.start :]
            self.start = position

    def forget_from(self, position: int) -> None:
        """Drop the rows of a position and those after it."""
        while self._parts and self.end > position:
            last = self._parts.pop()
            self.end -= len(last)
            if self.end < position:
                self._parts.append(last[: position - self.end])
                self.end = position

    def move(self, position: int, to: int) -> None:
        """Of all rows only that of a position stays, if it is here, as the row of another position."""
        row = self.take(position, position + 1) if self.start <= position < self.end else None
        self.forget_all()
        if row is not None:
            self.add(to, row)

    def select(self, first: int, kept: Sequence[int]) -> None:
        """Of the rows from `first` on only these, which ascend, as far as they are here."""
        if self.end <= first or not self._parts:
            return
        assert self.start <= first
        own = [row for row in kept if first + row < self.end]
        rows = self.take(first, self.end)[own]
        self.forget_all()
        self.add(first, rows)

    def forget_all(self) -> None:
        """Drop every row: the text before them has changed."""
        self.start = self.end = 0
        self._parts.clear()


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Rows [n, vocab] of all parts: a view, where they lie in one buffer at equal distances, else a copy."""
    if len(parts) == 1:
        return parts[0]
    size, pointers = parts[0].element_size(), [part.data_ptr() for part in parts]
    buffers = {at - part.storage_offset() * size for at, part in zip(pointers, parts, strict=True)}
    shapes, step = [part.shape for part in parts], 0
    if len(buffers) == 1 and len({width for _, width in shapes}) == 1:
        steps = {part.stride(0) for part, (rows, _) in zip(parts, shapes, strict=True) if rows > 1}
        for (one, other), part, (rows, _) in zip(pairwise(pointers), parts, shapes, strict=False):
            distance, rest = divmod(other - one, size)
            steps.add(distance - (rows - 1) * part.stride(0) if rest == 0 else 0)
        step = steps.pop() if len(steps) == 1 else 0
    if step < shapes[0][1]:
        return torch.cat(list(parts))
    return parts[0].as_strided((sum(rows for rows, _ in shapes), shapes[0][1]), (step, 1))
