"""Logits at consecutive positions, as they come from forwards."""

from __future__ import annotations

from collections.abc import Sequence

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

    @property
    def last(self) -> Tensor:
        """The last row [1, vocab]."""
        part = self._parts[-1]
        return part if part.shape[0] == 1 else part[-1:]

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
            self.start += self._parts.pop(0).shape[0]
        if self._parts and self.start < position:
            self._parts[0] = self._parts[0][position - self.start :]
            self.start = position

    def forget_from(self, position: int) -> None:
        """Drop the rows of a position and those after it."""
        while self._parts and self.end > position:
            last = self._parts.pop()
            self.end -= last.shape[0]
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
        self._parts = []


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Rows [n, vocab] of all parts: a view, where they lie in one buffer at equal distances, else a copy."""
    first, *others = parts
    if not others:
        return first
    size, width = first.element_size(), first.shape[1]
    starts, shapes = [part.data_ptr() for part in parts], [part.shape for part in parts]
    step = first.stride(0) * size if shapes[0][0] > 1 else starts[1] - starts[0]
    end = starts[0]  # where the next part starts, in bytes, if all lie so
    for part, start, (rows, own_width) in zip(parts, starts, shapes, strict=True):
        if start != end or own_width != width or (rows > 1 and part.stride(0) * size != step):
            return torch.cat(list(parts))
        end += rows * step
    buffer = first.untyped_storage()
    if step < width * size or step % size or end - step + width * size > buffer.data_ptr() + buffer.nbytes():
        return torch.cat(list(parts))
    return first.as_strided((sum([rows for rows, _ in shapes]), width), (step // size, 1))
