"""The caches of a model for several texts: one for all of them, or one for each."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor

from specens.engines.protocol import Context, Forward, Read, Text
from specens.engines.transformers.member import Member
from specens.engines.transformers.model import Model
from specens.engines.transformers.ragged_cache import RaggedCache
from specens.engines.transformers.reading import Reading


class SeparateContext(Context):
    """A cache of whatever kind for each text, and forwards of one text each."""

    def __init__(self, model: Model, reading: Reading, can_roll_back: bool) -> None:
        self._how = (model, reading, can_roll_back)

    def add(self, prompt: list[int]) -> Member:
        """A text with a cache of its own."""
        model, reading, can_roll_back = self._how
        return Member(model, prompt, can_roll_back, reading)

    def read(self, reads: Sequence[Read]) -> list[Tensor]:
        """Logits of one text after another."""
        logits, members = [], [read.text for read in reads]
        for member, read in zip(members, reads, strict=True):
            assert isinstance(member, Member)
            logits.append(member.read(read))
        self.forwards = [forward for member in members for forward in member.forwards]  # type: ignore[attr-defined]
        hidden = [member.hidden for member in members]  # type: ignore[attr-defined]
        self.hidden = None if any(rows is None for rows in hidden) else hidden
        return logits

    def holds_tree(self, text: Text, num_tokens: int) -> bool:
        """As its cache does."""
        assert isinstance(text, Member)
        return text.holds_tree(num_tokens)

    def remove(self, text: Text) -> None:
        """Nothing: its cache goes with it."""


class RaggedText(Text):
    """A text in a row of a RaggedCache, where tokens that come after a rejection are written over what was rejected.

    num_read: tokens in the row, the prompt included. num_nodes: of a draft tree after them.
    """

    def __init__(self, cache: RaggedCache, prompt: list[int]) -> None:
        self.prompt, self.row = prompt, cache.add_row()
        self.num_read = self.num_nodes = 0
        self._cache = cache

    def roll_back(self, length: int) -> None:
        """Forget the tokens after the first `length` generated ones, and all nodes."""
        self.num_read, self.num_nodes = min(self.num_read, len(self.prompt) + length), 0

    def keep_nodes(self, nodes: Sequence[int]) -> None:
        """Keep these nodes, as far as they are held."""
        kept = [node for node in nodes if node < self.num_nodes]
        self._cache.keep(self.row, self.num_read, kept)
        self.num_nodes = len(kept)

    def keep_path(self, path: Sequence[int]) -> None:
        """Have the nodes of the path as tokens."""
        self.keep_nodes(path)
        self.num_read, self.num_nodes = self.num_read + self.num_nodes, 0

    def new(self, read: Read) -> list[int]:
        """The tokens and nodes that the row lacks."""
        nodes = read.nodes[self.num_nodes :]
        if not self.num_read:
            return [*self.prompt, *read.sequence, *nodes]
        return [*read.sequence[self.num_read - len(self.prompt) :], *nodes]


class RaggedContext(Context):
    """One cache for all texts, each of a length of its own: a forward reads the new tokens of all of them."""

    def __init__(self, model: Model, reading: Reading) -> None:
        self._model = model
        self._reading = reading
        self._cache = RaggedCache(model)
        self._texts: list[RaggedText] = []  # in the order of their rows

    def add(self, prompt: list[int]) -> RaggedText:
        """A text in the next row."""
        self._texts.append(RaggedText(self._cache, prompt))
        return self._texts[-1]

    def remove(self, text: Text) -> None:
        """Forget a text; the last one moves into its row."""
        assert isinstance(text, RaggedText)
        last = self._texts.pop()
        self._cache.remove_row(text.row)
        if last is not text:
            self._texts[text.row], last.row = last, text.row

    def holds_tree(self, text: Text, num_tokens: int) -> bool:  # noqa: ARG002
        """Where masks say who sees whom."""
        return self._reading.trees

    def read(self, reads: Sequence[Read]) -> list[Tensor]:
        """Logits of all texts, from a forward for those with a prompt to read and one for the others."""
        # In the order of their rows, so that a forward of all reads its buffers in place.
        order = sorted(range(len(reads)), key=lambda index: reads[index].text.row)  # type: ignore[attr-defined]
        fresh = [index for index in order if not reads[index].text.num_read]  # type: ignore[attr-defined]
        fed = [index for index in order if index not in fresh]
        found: dict[int, tuple[Tensor, Tensor | None]] = {}
        self.forwards = []
        for indices in filter(None, (fresh, fed)):  # prompts are much longer than what comes after them
            found |= dict(zip(indices, self._forward([reads[index] for index in indices]), strict=True))
        hidden = [found[index][1] for index in range(len(reads))]
        self.hidden = None if any(rows is None for rows in hidden) else hidden  # type: ignore[assignment]
        return [found[index][0] for index in range(len(reads))]

    def _forward(self, reads: list[Read]) -> list[tuple[Tensor, Tensor | None]]:
        """The logits of each text, and the hidden states beside them."""
        started = time.perf_counter()
        texts: list[RaggedText] = [read.text for read in reads]  # type: ignore[misc]
        tokens = [text.new(read) for text, read in zip(texts, reads, strict=True)]
        rows, lengths = [text.row for text in texts], [text.num_read + text.num_nodes for text in texts]
        trees, keep = [read.parents for read in reads], max(read.num_rows for read in reads)
        logits = self._cache.forward(rows, lengths, tokens, keep, trees)
        for text, read in zip(texts, reads, strict=True):
            text.num_read, text.num_nodes = len(text.prompt) + len(read.sequence), len(read.nodes)
        self.forwards = [*self.forwards, Forward(texts, list(map(len, tokens)), time.perf_counter() - started)]
        hidden = self._model.hidden
        ends = [slice(logits.shape[1] - read.num_rows, None) for read in reads]
        return [(logits[row, end], None if hidden is None else hidden[row, end]) for row, end in enumerate(ends)]
