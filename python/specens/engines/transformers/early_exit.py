"""A model that is read in two parts: its first layers, which can draft by themselves, and those after them.

Source: Elhoushi et al., LayerSkip, ACL 2024, section 4.3: what drafted a token need not read it again to verify it.
Each part has a cache of its layers alone. What the first part has read, drafts or not, waits as hidden states until the
second part goes on from them; so of a token every layer is computed once, and its keys and values are kept once.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specens.engines.protocol import Context, Engine, Needs, Read, Text
from specens.engines.transformers.causal_lm import CausalLM
from specens.engines.transformers.contexts import RaggedContext, RaggedText
from specens.engines.transformers.fewer_layers import num_layers, with_layers
from specens.engines.transformers.identity import with_adapters
from specens.engines.transformers.probing import agrees, reading_of
from specens.engines.transformers.ragged_cache import RaggedCache
from specens.engines.transformers.reading import Reading

PROBE = [3, 0, 4, 1, 2]


def in_two_parts(member: CausalLM, exit_layer: int) -> TwoParts | None:
    """The member with an exit after so many layers; None where its model is not one that can be read so.

    That takes layers after the exit, texts that share a ragged cache, as they do in a batch, and an embedding that is
    all that comes before the first layer, so that other layers can go on from hidden states.
    """
    if exit_layer >= num_layers(member.base) or not reading_of(member, Needs(2)).shares:
        return None
    parts = TwoParts(member, exit_layer)
    with torch.inference_mode(), member.running():
        whole, halves = (RaggedContext(member, Reading()), parts.open(Needs(2)))
        expected = whole.read([Read(whole.add(PROBE), [], 1)])[0]
        agree = agrees(member, lambda: halves.read([Read(halves.add(PROBE), [], 1)])[0], expected)
    return parts if agree else None


class TwoParts(CausalLM):
    """A member with an early exit.

    exit: the first layers as the engine of a drafter: its texts are parts of this one's.
    """

    def __init__(self, member: CausalLM, exit_layer: int) -> None:
        vars(self).update(vars(member))
        self.exit = FirstLayers(member, exit_layer)
        self._others = CausalLM(with_layers(member.base, range(exit_layer, num_layers(member.base))))

    def open(self, needs: Needs) -> Context:
        """An empty context; texts share the caches of its parts, one text too."""
        return TwoContexts(self.exit, self._others, reading_of(self, replace(needs, num_texts=max(needs.num_texts, 2))))

    def keep_hidden(self) -> None:
        """Of the part with the output layer."""
        self._others.keep_hidden()

    def is_same_as(self, other: Engine) -> bool:
        """Itself alone has this exit."""
        return self is other


class FirstLayers(CausalLM):
    """The first layers of a model, with its last norm and its output layer after them.

    states: [batch, new, width], what the last forward left to the layers after these.
    """

    is_part = True

    def __init__(self, member: CausalLM, exit_layer: int) -> None:
        super().__init__(with_layers(member.base, range(exit_layer)))
        last: Any = self._decoder.layers[-1]
        last._forward_hooks = OrderedDict(last._forward_hooks)  # a copy's, not the member's
        last.register_forward_hook(self._keep)

    @property
    def _decoder(self) -> Any:
        return self.base.model

    def _keep(self, _: Any, __: Any, output: Any) -> None:
        self.states: Tensor = output[0] if isinstance(output, tuple) else output

    def _call(self, inputs: dict[str, Any], rows: int) -> Tensor:
        if rows:
            return super()._call(inputs, rows)
        with with_adapters(self._adapters):  # for the layers after it alone: without the output layer
            return self._decoder(**inputs).last_hidden_state[:, :0]


class FirstText(RaggedText):
    """What the first layers hold of a text, whose second part may lack the last of it.

    states: [n, width] of the tokens and nodes in the row from the place `first` on, which wait for the second part.
    """

    first = 0
    states: Tensor | None = None

    @property
    def num_held(self) -> int:
        """Tokens of the row, the prompt's and nodes included."""
        return self.num_read + self.num_nodes

    def roll_back(self, length: int) -> None:
        """Forget the tokens after the first `length` generated ones, and all nodes."""
        super().roll_back(length)
        if self.states is not None:
            self.states = self.states[: max(self.num_held - self.first, 0)]
        self.first = min(self.first, self.num_held)

    def keep_nodes(self, nodes: Sequence[int]) -> None:
        """Keep these nodes, as far as they are held, and their states."""
        settled, states = self.num_read - self.first, self.states
        if states is not None and settled < 0:  # the second part has some: all are read again
            nodes, states = (), None
        kept = [node for node in nodes if node < self.num_nodes]
        super().keep_nodes(kept)
        self.states = None if states is None else states[[*range(settled), *(settled + node for node in kept)]]
        self.first = min(self.first, self.num_held)

    def note(self, states: Tensor, start: int) -> None:
        """Keep the states of what was read into the places from `start` on."""
        if self.states is None:
            self.first = start
        self.states = states if self.states is None else torch.cat([self.states, states])

    def forget_states(self) -> None:
        """The second part has read everything."""
        self.first, self.states = self.num_held, None

    def lacks(self, read: Read) -> bool:
        """Whether it has something to read, once it holds nothing whose logits are wanted and not known any more."""
        total = len(self.prompt) + len(read.sequence) + len(read.nodes)
        held = total - read.num_rows
        if self.num_held > held >= self.num_read:
            self.keep_nodes(range(held - self.num_read))
        elif self.num_held > held >= len(self.prompt):
            self.roll_back(held - len(self.prompt))
        elif self.num_held > held:
            self.num_read = self.num_nodes = self.first = 0
            self.states = None
        return self.num_held < total


class FirstContext(RaggedContext):
    """The texts of the first layers, which come and go with those that they are parts of."""

    def __init__(self, model: FirstLayers, reading: Reading) -> None:
        super().__init__(model, reading)
        self._first_layers = model

    def add(self, prompt: list[int]) -> FirstText:
        """A text in the next row."""
        text = FirstText(self._cache, prompt)
        self._texts.append(text)
        return text

    def remove(self, text: Text) -> None:
        """Nothing: it goes with the whole text."""

    def remove_part(self, text: FirstText) -> None:
        """Forget a text."""
        super().remove(text)

    def read(self, reads: Sequence[Read]) -> list[Tensor]:
        """Logits after the exit."""
        for read in reads:
            assert isinstance(read.text, FirstText)
            lacks = read.text.lacks(read)
            assert lacks
        return super().read(reads)

    def _forward(self, reads: list[Read]) -> list[tuple[Tensor, Tensor | None]]:
        texts: list[FirstText] = [read.text for read in reads]  # type: ignore[misc]
        starts = [text.num_held for text in texts]
        found = super()._forward(reads)
        for text, start, states in zip(texts, starts, self._first_layers.states, strict=True):
            text.note(states[start - text.num_held :], start)
        return found


class WholeText(RaggedText):
    """What the second part holds of a text. part: what the first layers hold, which may be more, or less."""

    def __init__(self, cache: RaggedCache, prompt: list[int], part: FirstText) -> None:
        super().__init__(cache, prompt)
        self.part = part

    def roll_back(self, length: int) -> None:
        """Of both."""
        self.part.roll_back(length)
        super().roll_back(length)

    def keep_nodes(self, nodes: Sequence[int]) -> None:
        """The first layers read theirs again, unless they have been told the same as a text of their own."""
        self.part.keep_nodes(())
        super().keep_nodes(nodes)

    def keep_path(self, path: Sequence[int]) -> None:
        """Of both."""
        self.part.keep_path(path)
        super().keep_path(path)

    def new(self, read: Read) -> Tensor:  # type: ignore[override]  # noqa: ARG002
        """The hidden states of the tokens and nodes that the row lacks."""
        assert self.part.states is not None
        return self.part.states[self.num_read + self.num_nodes - self.part.first :]


class TwoContexts(RaggedContext):
    """The texts of a model in two parts."""

    def __init__(self, exit: FirstLayers, others: CausalLM, reading: Reading) -> None:
        super().__init__(others, reading)
        self._part = FirstContext(exit, reading)

    def add(self, prompt: list[int]) -> WholeText:
        """A text in the next row of each part."""
        text = WholeText(self._cache, prompt, self._part.add(prompt))
        self._texts.append(text)
        return text

    def remove(self, text: Text) -> None:
        """Forget a text, and its part."""
        assert isinstance(text, WholeText)
        super().remove(text)
        self._part.remove_part(text.part)

    def part(self, text: Text) -> tuple[Context, Text]:
        """What the first layers hold of it, for the engine `TwoParts.exit`."""
        assert isinstance(text, WholeText)
        return self._part, text.part

    def read(self, reads: Sequence[Read]) -> list[Tensor]:
        """Logits of all texts: the first layers read what they have not, the others go on from what they left."""
        started = time.perf_counter()
        parts: list[FirstText] = [read.text.part for read in reads]  # type: ignore[attr-defined]
        own = [read._replace(text=part, num_rows=0) for part, read in zip(parts, reads, strict=True)]
        lacking = [read for part, read in zip(parts, own, strict=True) if part.lacks(read)]
        if lacking:
            self._part.read(lacking)
        seconds = time.perf_counter() - started
        logits = super().read(reads)
        for part in parts:
            part.forget_states()
        each = seconds / len(self.forwards)
        self.forwards = [replace(forward, seconds=forward.seconds + each) for forward in self.forwards]
        return logits
