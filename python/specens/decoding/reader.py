"""What the texts of a request hold in an engine, and what reading them has cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock

from torch import Tensor

from specens.decoding.statistics import Statistics
from specens.engines.checks import add_text, open_context
from specens.engines.protocol import Context, Engine, Needs, Text, check_tokens

Known = tuple[Sequence[Tensor], Sequence[Tensor]]  # logits and hidden states of each text
NOTHING: Known = ((), ())
COUNTING = Lock()  # statistics are a request's, whose members may be read at the same time


class Reader:
    """The texts of a request in one context: one for each of some prompts, and after all of them the same tokens.

    indices: of the members whose texts they are, or OUTSIDE. statistics: where forwards are counted.
    texts: those that there are already, of an engine that is a part of another; else they are added.
    num_read, num_nodes: the generated tokens, and the nodes of a draft tree after them, that the texts hold.
    num_texts: how many there are. unread: of each, named by its identity, the tokens of its prompt until it is read.
    hidden: beside the last logits, where the engine keeps hidden states.
    """

    def __init__(
        self,
        context: Context,
        vocab_size: int,
        prompts: Sequence[list[int]],
        indices: Sequence[int],
        statistics: Statistics,
        texts: Sequence[Text] = (),
    ) -> None:
        self.context = context
        self.indices = tuple(indices)
        self.texts = list(texts) or [add_text(context, prompt) for prompt in prompts]
        self.num_read = self.num_nodes = 0
        self.hidden: Sequence[Tensor] = ()
        self.num_texts = len(self.texts)
        self.unread = {id(text): len(prompt) for text, prompt in zip(self.texts, prompts, strict=True)}
        self._statistics = statistics
        self._vocab_size = vocab_size
        self._prompt_lens = [len(prompt) for prompt in prompts]
        self._prompt_read = False
        self._last: Known = NOTHING  # the logits and hidden states of the last read

    def close(self) -> None:
        """Forget the texts."""
        for text in reversed(self.texts):
            self.context.remove(text)

    def part(self, index: int) -> tuple[Context, Text]:
        """Where a part of the engine has what it holds of a member's text."""
        return self.context.part(self.texts[self.indices.index(index)])

    def roll_back(self, length: int) -> None:
        """Forget the tokens after the first `length` generated ones, which are settled, and all nodes."""
        for text in self.texts:
            text.roll_back(length)
        if length < self.num_read or self.num_nodes:
            self._last = NOTHING
        self.num_read, self.num_nodes = min(self.num_read, length), 0

    def settle(self, length: int) -> None:
        """The first `length` generated tokens will never be rolled back; those after them stay under test."""
        if self.num_read <= length:
            self.roll_back(length)
        for text in self.texts:
            text.settle(length)

    def keep_nodes(self, first: int, nodes: Sequence[int]) -> None:
        """Of the drafts after the first `first` tokens keep these, which ascend, each with its parent."""
        if self.num_nodes:
            for text in self.texts:
                text.keep_nodes(nodes)
            self.num_nodes, self._last = sum(node < self.num_nodes for node in nodes), NOTHING
        elif self.num_read > first + _num_same(nodes):
            self.roll_back(first)

    def keep_path(self, first: int, path: Sequence[int]) -> None:
        """Of the drafts after the first `first` tokens an accepted path becomes tokens, the others are forgotten."""
        if self.num_nodes:
            for text in self.texts:
                text.keep_path(path)
            kept = sum([node < self.num_nodes for node in path])
            self.num_read, self.num_nodes, self._last = self.num_read + kept, 0, NOTHING
        elif self.num_read > first + _num_same(path):  # of drafts that it read as a chain
            self.roll_back(first + _num_same(path))

    def holds_tree(self, num_tokens: int) -> bool:
        """Whether the texts take the nodes of a tree, with which they have so many generated tokens."""
        lens = zip(self.texts, self._prompt_lens, strict=True)
        return all(self.context.holds_tree(text, own + num_tokens) for text, own in lens)

    def check(self, tokens: Sequence[int]) -> None:
        """Raise ValueError where the engine cannot read one of these, a sequence and nodes, that is new to it."""
        new = tokens[self.num_read + self.num_nodes :]
        if new and max(new) >= self._vocab_size:
            check_tokens(new, self._vocab_size, f"member {self.indices[0]}")

    def known(self) -> Known:
        """Logits and hidden states after the last token read, of each text, if there are any: they need no forward."""
        logits, hidden = self._last
        return [rows[-1] for rows in logits], [rows[-1] for rows in hidden]

    def count(self, tokens: Mapping[int, int], seconds: float) -> None:
        """Book these texts' part of a forward, if any. seconds: of each text in it.

        tokens: how many it read of each text, by the text's identity.
        """
        counts = [(index, tokens[key]) for index, key in zip(self.indices, self.unread, strict=True) if key in tokens]
        if counts:
            with COUNTING:
                self._statistics.count_forward(counts, seconds, reads_prompt=not self._prompt_read)
            for key in () if self._prompt_read else self.unread:
                self.unread[key] = 0
            self._prompt_read = True

    def keep(self, num_read: int, num_nodes: int, logits: Sequence[Tensor], hidden: Sequence[Tensor]) -> None:
        """Remember what is known after a read."""
        self.num_read, self.num_nodes, self.hidden = num_read, num_nodes, hidden
        self._last = logits, hidden


def _num_same(nodes: Sequence[int]) -> int:
    """How many of the first nodes of a chain are the first of these, which ascend."""
    return sum(index == node for index, node in enumerate(nodes))


def open_reader(
    engine: Engine, prompts: Sequence[list[int]], indices: Sequence[int], statistics: Statistics, **needs: bool
) -> Reader:
    """A reader with a context of its own. needs: of `Needs`."""
    return Reader(open_context(engine, Needs(len(prompts), **needs)), engine.vocab_size, prompts, indices, statistics)
