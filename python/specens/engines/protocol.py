"""What runs a member of an ensemble: derive from `Engine`, `Context` and `Text` to bring another engine.

    engine = MyEngine(...)                          one loaded model, and the facts about it
    context = engine.open(Needs(num_texts=2))       its memory for the texts of a batch
    text = context.add(prompt)                      one text in it; nothing is read yet
    (logits,) = context.read([Read(text, generated, num_rows=1)])
    text.roll_back(3)                               drafts were rejected
    context.remove(text)

An engine can be a member, or the model of a drafter, wherever a model of transformers can. `examples/own_engine.py` is
a whole one; `specens.engines.transformers` another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Needs:
    """What will be asked of a context.

    num_texts: at most so many texts at a time. rollback: drafts are read that may be rejected. trees: draft trees are.
    """

    num_texts: int = 1
    rollback: bool = True
    trees: bool = False


class Read(NamedTuple):
    """What to read of a text.

    sequence: all its generated tokens, settled ones and then drafts, without the prompt. Those that the text holds
        already are the same as before; it reads the others, and the prompt with the first ones.
    num_rows: of logits, one at least: after each of the last so many of the tokens and nodes. One more than are new may
        be asked for where the prompt is new.
    nodes, parents: of a draft tree after the sequence, the parent of each before it, -1 below the sequence. Those that
        the text holds already come first, as before. A node's position is one after its parent's, and it sees the
        sequence and its ancestors.
    """

    text: Text
    sequence: Sequence[int]
    num_rows: int = 1
    nodes: Sequence[int] = ()
    parents: Sequence[int] = ()


@dataclass(frozen=True)
class Forward:
    """One forward that went into a `read`: the new tokens of each text in it, prompts included, and its seconds."""

    texts: Sequence[Text]
    num_tokens: Sequence[int]
    seconds: float

    def __post_init__(self) -> None:
        """Raise ValueError where there is not a number for each text."""
        if len(self.texts) != len(self.num_tokens):
            raise ValueError(f"num_tokens: expected one for each of {len(self.texts)} texts, got {self.num_tokens}")


class Text(ABC):
    """A prompt and what is generated after it, as far as a context holds it. Lengths count generated tokens."""

    @abstractmethod
    def roll_back(self, length: int) -> None:
        """Forget all tokens after the first `length`, which are settled, and all nodes; it may hold less already."""

    def settle(self, length: int) -> None:  # noqa: B027
        """The first `length` tokens are settled; those after them stay, and may still be rolled back."""

    def keep_path(self, path: Sequence[int]) -> None:  # noqa: B027
        """These nodes, each below the one before, become the next tokens, all other nodes are forgotten.

        Nodes that are not held are read with the next tokens, so a text that never holds any has nothing to do.
        """

    def keep_nodes(self, nodes: Sequence[int]) -> None:  # noqa: ARG002
        """Forget all nodes but these, which ascend, each with its parent, and are numbered anew from 0 on.

        Held ones that it forgets too are read again.
        """
        self.keep_path(())


class Context(ABC):
    """The memory of a model for several texts, each of a length of its own.

    forwards: those of the last `read`, where it was not one forward of all that was new.
    hidden: of the last `read` the hidden states [rows, width] beside each text's logits, where the engine keeps them.
    kind: dtype, device and vocabulary of the logits so far, as `engines.checks` notes it.
    """

    forwards: Sequence[Forward] = ()
    hidden: Sequence[Tensor] | None = None
    kind: tuple[torch.dtype, torch.device, int] | None = None

    @abstractmethod
    def add(self, prompt: list[int]) -> Text:
        """A new text of one token or more, of which nothing is read yet."""

    @abstractmethod
    def read(self, reads: Sequence[Read]) -> list[Tensor]:
        """Logits [num_rows, vocab] of each text: row i is of what comes after the i-th of its last ones.

        In float32, bfloat16 or float16, of one dtype, device and vocabulary in all reads, the vocabulary contiguous.
        They are used for several rounds: what lies in a buffer that is written again needs a copy. Tokens are below
        `vocab_size`, which is seen to before.
        """

    @abstractmethod
    def remove(self, text: Text) -> None:
        """Forget a text."""

    def part(self, text: Text) -> tuple[Context, Text]:
        """Where an engine with `is_part` has what it holds of a text, which goes when the text goes."""
        raise NotImplementedError

    def holds_tree(self, text: Text, num_tokens: int) -> bool:  # noqa: ARG002
        """Whether `read` takes nodes, which make so many tokens of a text in all, prompt included.

        Elsewhere the paths of a tree are read as chains, and each is rolled back.
        """
        return False


class Engine(ABC):
    """A loaded model.

    name: of the engine, for people. vocab_size: token ids below it can be read. max_length: the most tokens of a text,
        prompt included, or None. end_tokens: ids that end a text. device: where logits are. generation_config: settings
        of texts as transformers has them, or None. tokenizer: its own, where it has one. runs_elsewhere: whether `read`
        mostly waits for another process or machine, so that members of such engines are read at the same time, each in
        a thread. is_part: whether it is a part of the member whose prompts it reads, of a drafter: then no context is
        opened for it, but `Context.part` of that member's has its texts.
    """

    name: str = ""
    vocab_size: int
    max_length: int | None = None
    end_tokens: frozenset[int] = frozenset()
    device: torch.device = torch.device("cpu")
    generation_config: Any = None
    tokenizer: Any = None
    runs_elsewhere: bool = False
    is_part: bool = False

    @abstractmethod
    def open(self, needs: Needs) -> Context:
        """An empty context. Raises ValueError as `check`."""

    def check(self, needs: Needs) -> None:  # noqa: B027
        """Raise ValueError where the model cannot be read as it will have to be."""

    def check_length(self, num_tokens: int) -> None:  # noqa: B027
        """Raise ValueError where memory of a fixed size holds less than so many tokens and nodes of a text."""

    def is_same_as(self, other: Engine) -> bool:
        """Whether one may read for the other, since they compute the same: texts of both go into one `read`."""
        return self is other

    def running(self) -> AbstractContextManager[Any]:
        """What has to surround reads."""
        return nullcontext()

    def keep_hidden(self) -> None:
        """Have contexts keep hidden states, for `specens.drafters.Heads`. Raises ValueError where there are none."""
        raise ValueError(f"heads: expected a member with an output layer, got {type(self).__name__}")


def check_tokens(tokens: Sequence[int], vocab_size: int, member: str) -> None:
    """Raise ValueError where a model cannot read a token."""
    if tokens and max(tokens) >= vocab_size:
        raise ValueError(
            f"members: token {max(tokens)} was generated, but {member} has embeddings only for ids below {vocab_size}; "
            "do the members share one tokenizer?"
        )


@contextmanager
def running(engines: Iterable[Engine]) -> Iterator[None]:
    """What has to surround reads of these engines."""
    with ExitStack() as stack:
        for engine in engines:
            stack.enter_context(engine.running())
        yield
