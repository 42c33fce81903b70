"""One generation under way: what is settled, what is drafted, and where its text ends."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

from torch import Tensor

from specens.decoding.drafts import ROOT, Drafts, below
from specens.decoding.logit_rows import LogitRows
from specens.decoding.masks import Constraint, Masks
from specens.decoding.processors import LogitsProcessor
from specens.decoding.reader import Reader
from specens.decoding.statistics import OUTSIDE, Statistics
from specens.decoding.text_stream import TextStream
from specens.engines.token_ids import TokenIds
from specens.targets import DenseTarget
from specens_kernels import (
    Contrastive,
    DecisionTree,
    LogitMixture,
    Mixture,
    Processing,
    Replacement,
    Sampling,
    Status,
)

Ensemble = Mixture | LogitMixture | Contrastive | DenseTarget


class RequestError(Exception):
    """What ends one request of a batch, and no other. error: what was raised for it."""

    def __init__(self, request: Request, error: Exception) -> None:
        super().__init__(str(error))
        self.request, self.error = request, error


# Drafts, who proposed them, which were accepted, and the parents of a tree's.
Tested = tuple[Sequence[int], Sequence[int], Collection[int], Sequence[int] | None]
NOTHING_TESTED: Tested = ((), (), (), None)
Told = tuple[float, list[tuple[int, float]] | None]  # of an emitted token: logprob and top_logprobs of its event


@dataclass
class Event:
    """One emitted token.

    kind: "draft accepted", "recovered" (drawn after a rejection), "bonus" (drawn after a fully accepted chain) or
        "standard" (drawn without speculation). proposer: the member whose draft it was, else None.
    text: what the token adds to the text. logprob: under the target distribution, top_logprobs: the most likely tokens
        at its place with theirs, the likeliest first; None unless asked for.
    """

    token: int
    kind: str
    proposer: int | None
    text: str
    logprob: float | None = None
    top_logprobs: list[tuple[int, float]] | None = None

    def to_dict(self) -> dict:
        """The fields as plain values for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Draft:
    """A draft token as it was tested.

    proposer: the member, None for a drafter that is none. accepted: by the test, also where the text ended before it.
    parent: in a tree, by its place among the drafts, -1 for the text itself.
    """

    token: int
    proposer: int | None
    accepted: bool
    parent: int | None = None


@dataclass(frozen=True)
class Task:
    """What a generation has to do: the target distribution, the seed and where to stop.

    prompts: token ids for each member. processing: logit bias and penalties of this request, without token tables.
    logits_processors: called with ids [1, tokens] and logits [1, vocab] of a member, as those of transformers.
    model_processors: in their place, a function of a prompt's length that makes those of its member.
    constraint: called with the generated tokens; the bit mask int32 [words] of the tokens that may come next, or None.
    logprobs, top_logprobs: whether log-probabilities are told, and of how many of the most likely tokens.
    rule: how drafts are accepted and tokens drawn, a rule of `specens_kernels.verify_chain`.
    index: the number of the prompt, sample: of the text among those of its prompt.
    """

    prompts: Sequence[list[int]]
    ensemble: Ensemble | None
    sampling: Sampling
    seed: int
    max_new_tokens: int
    stop_tokens: frozenset[int]
    logprobs: bool = False
    top_logprobs: int = 0
    min_new_tokens: int = 0
    stop_strings: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    processing: Processing | None = None
    logits_processors: tuple[LogitsProcessor, ...] = ()
    model_processors: Callable[[int], Sequence[LogitsProcessor]] | None = None
    constraint: Constraint | None = None
    rule: Any = "token"
    index: int = 0
    sample: int = 0


def counted_indices(ensemble: Ensemble | None, num_indices: int) -> tuple[int, ...]:
    """The indices whose weight is not 0; the others can only draft."""
    if isinstance(ensemble, Mixture | LogitMixture) and ensemble.plausibility is None:
        return tuple(index for index, weight in enumerate(ensemble.weights) if weight != 0)
    return tuple(range(num_indices))


def target_of(ensemble: Ensemble | None, counted: tuple[int, ...]) -> Ensemble | None:
    """The ensemble of the members that count, the others having no weight; one object for requests that are alike."""
    if not isinstance(ensemble, Mixture | LogitMixture) or ensemble.plausibility is not None:
        return ensemble
    return _of_weights(ensemble, counted)


@lru_cache
def _of_weights(ensemble: Mixture | LogitMixture, counted: tuple[int, ...]) -> Ensemble | None:
    weights = tuple(float(ensemble.weights[index]) for index in counted)
    alone = len(weights) == 1 and (isinstance(ensemble, Mixture) or weights == (1.0,))
    return None if alone else replace(ensemble, weights=weights)


def kind_of(task: Task, counted: tuple[int, ...]) -> tuple:
    """What tasks have in common that differ in numbers only."""
    ensemble = task.ensemble
    mixing = [getattr(ensemble, name, None) for name in ("filter", "plausibility", "amateur_weight")]
    mixing += [ensemble] if isinstance(ensemble, DenseTarget) else []
    return type(ensemble), *mixing, counted, task.sampling.filter_order, task.logprobs, task.constraint is not None


class Request:
    """The state of one generation that schedules, drafters and tests work on.

    sequence: the settled tokens, then the drafts, in the order of their nodes. counted: the members with
    a part in the target, target: their ensemble, kind: what is one for requests that go into
    one call. is_greedy: the most likely token is taken, at temperature 0. draws_by_gumbel: tokens are those of the best
    Gumbel scores, so that a seed is a text. has_processors: functions edit logits before anything is drawn.
    rows: for each member the logits that its member has computed after the settled tokens: the
    row at index `num_settled` is after them, the next ones after each draft; and of outside drafters, `rows[OUTSIDE]`
    and those before it. So what is said of an index below holds of a chain's positions and of a tree's nodes.
    drawn_at: the index that the last token was drawn at. readers: how each scorer reads it
    (`decoding.reader`). drafter_state: what its drafter remembers; measured: what was measured of each proposer.
    hidden: of members that keep them, the position of the last forward's first hidden state, and all [rows, width].
    token_ids: what the logits processors of each member see.
    num_readable: tokens below it have an embedding in every member. num_turns: how many turns an alternating schedule
    has given it, last_turns: in which each scorer read last.
    """

    def __init__(self, task: Task, tokenizer: Any | None, num_readable: int, num_outside: int = 1) -> None:
        num_indices = len(task.prompts)
        self.task = task
        self.num_readable = num_readable
        self.statistics = Statistics.of(num_indices)
        self.sequence: list[int] = []
        self.num_settled = 0
        self.drafts = Drafts()
        self.drawn_at = 0
        self.rows = [LogitRows() for _ in range(num_indices + num_outside)]
        self.counted = counted_indices(task.ensemble, num_indices)
        self.target = target_of(task.ensemble, self.counted)
        self.kind = kind_of(task, self.counted)
        self.is_greedy = float(task.sampling.temperature) == 0.0
        self.draws_by_gumbel = bool(task.rule == "gumbel")
        self.has_processors = bool(task.model_processors or task.logits_processors)
        self.readers: dict[int, Reader] = {}
        self.drafter_state: Any = None
        self.measured: dict[int, Any] = {}
        self.hidden: dict[int, tuple[int, Tensor]] = {}
        self.token_ids: dict[int, TokenIds] = {}
        self.events: list[Event] = []
        self.num_turns = 0
        self.last_turns: dict[int, int] = {}
        self._started = time.perf_counter()
        self._text = TextStream(tokenizer, task.stop_strings, skip_special_tokens=task.skip_special_tokens)
        self._masks = None if task.constraint is None else Masks(task.constraint, task.stop_tokens)
        self._processors: dict[int, Sequence[LogitsProcessor]] = {}
        self._excluded: set[int] = set()
        self._has_ended = False
        self._num_delivered = 0
        self._tested: Tested = NOTHING_TESTED

    @property
    def settled(self) -> list[int]:
        """The settled tokens: the text that candidates are to go on from, whatever others have drafted after it."""
        return self.sequence[: self.num_settled]

    @property
    def remaining(self) -> int:
        """How many tokens may still be settled."""
        return self.task.max_new_tokens - self.num_settled

    @property
    def finished(self) -> bool:
        """Whether the text has come to its end, or to the number of tokens that was asked for."""
        if self.num_settled >= self.task.max_new_tokens or self._has_ended:
            return True
        return self._masks is not None and self.stopped

    @property
    def stopped(self) -> bool:
        """Whether the settled tokens end with an end of sequence or a stop string, or complete the constraint."""
        return self._has_ended or (self._masks is not None and not self.may_follow(self.num_settled))

    @property
    def can_draft(self) -> bool:
        """Whether a token after the last one could ever be used."""
        return self.can_draft_after(len(self.drafts.parents) - 1)

    def can_draft_after(self, node: int) -> bool:
        """Whether a token after a draft, or after the settled text, could ever be used."""
        depth, first = self.drafts.depths[node] if node >= 0 else 0, self.num_settled
        if depth >= self.task.max_new_tokens - first or self._has_ended or (self._masks is not None and self.stopped):
            return False
        return (node < 0 or self.sequence[first + node] < self.num_readable) and self.may_follow(first + 1 + node)

    def is_unreadable(self, node: int) -> bool:
        """Whether some member has no embedding for a draft: it is tested, but never read."""
        return node >= 0 and self.sequence[self.num_settled + node] >= self.num_readable

    @property
    def readable(self) -> list[int]:
        """The sequence as members read it.

        Without the last draft of a chain that is unreadable; in a tree others stand in the place of those.
        """
        if not self.drafts.parents:
            return self.sequence
        if not self.drafts.is_chain:
            drafts = self.sequence[self.num_settled :]
            if max(drafts) >= self.num_readable:
                return self.sequence[: self.num_settled] + [min(token, self.num_readable - 1) for token in drafts]
            return self.sequence
        return self.sequence[:-1] if self.sequence[-1] >= self.num_readable else self.sequence

    def text_before(self, index: int) -> list[int]:
        """The generated tokens that the row at an index is after."""
        if self.drafts.is_chain or index <= self.num_settled:
            return self.sequence[:index]
        return self.settled + self.drafts_before(index)

    def drafts_before(self, index: int) -> list[int]:
        """Those of them that are drafts."""
        first = self.num_settled
        return [self.sequence[first + node] for node in self.drafts.path(index - first - 1)]

    def processors(self, prompt_len: int) -> Sequence[LogitsProcessor]:
        """The logits processors of a member whose prompt has so many tokens."""
        make = self.task.model_processors
        if make is None:
            return self.task.logits_processors
        if prompt_len not in self._processors:
            self._processors[prompt_len] = make(prompt_len)
        return self._processors[prompt_len]

    def may_follow(self, index: int) -> bool:
        """Whether a token can stand at an index: not after an end, nor after a draft that cannot be accepted."""
        first = self.num_settled
        if index < first or (index == first and self._masks is None):
            return True
        is_chain = self.drafts.is_chain
        path = range(first, index) if is_chain else [first + node for node in self.drafts.path(index - first - 1)]
        if self._excluded and not self._excluded.isdisjoint(path):
            return False
        if self._masks is not None:
            return self._masks.at(index, self) is not None
        tokens = self.sequence[first:index] if is_chain else [self.sequence[position] for position in path]
        return self.task.stop_tokens.isdisjoint(tokens)

    def note_processed(self, index: int, given: Tensor, edited: Tensor) -> None:
        """Remember the drafts that processors exclude: nothing stands after them, so none is asked about that.

        given, edited: the logits [vocab] of a member at an index. Members with prompts of their own may exclude
        different tokens, and CoSD's rules and dense targets may keep a draft that each member excludes.
        """
        task = self.task
        if isinstance(task.rule, Replacement | DecisionTree) or isinstance(task.ensemble, DenseTarget):
            return
        if not all(prompt == task.prompts[0] for prompt in task.prompts):
            return
        for node in self.drafts.children(index - self.num_settled - 1):
            token = self.sequence[self.num_settled + node]
            if token < len(given) and given[token] > -math.inf and edited[token] == -math.inf:
                self._excluded.add(self.num_settled + node)

    def mask(self, index: int) -> Tensor:
        """The bit mask of the tokens that may stand at an index, by the request's constraint.

        Where none may follow, all of them: what such a row gives is dropped with the draft before it, or the end.
        """
        assert self._masks is not None
        mask = self._masks.at(index, self)
        return self._masks.all_tokens if mask is None else mask

    def add_draft(self, token: int, proposer: int, row: Tensor | None = None, parent: int | None = None) -> None:
        """Append a draft token after the last one, or after the node `parent`.

        proposer: the member from whose distribution it was drawn, or an outside drafter: then row [vocab] are the
        logits that it was drawn from, unless `rows` of it has them already; without either it was not drawn at all.
        """
        if row is not None:
            self.rows[proposer].add(len(self.sequence), row[None])
        self.drafts.add(parent, token, proposer)
        self.sequence.append(token)
        self.statistics.drafted[proposer if proposer > OUTSIDE else OUTSIDE] += 1

    def choose_draft(self, token: int, proposer: int, parent: int) -> int:
        """The node of a token that was chosen after another node: the one that there is, or a new one."""
        if (parent, token) not in self.drafts.edges:
            self.add_draft(token, proposer, parent=parent)
        return self.drafts.edges[parent, token]

    def drop_excluded_drafts(self) -> None:
        """Take back the drafts that the constraint excludes, with all after them: some rules would let them stand."""
        if self._masks is None:
            return
        excluded = [node for node in range(len(self.drafts)) if not self._masks.allows(node, self)]
        gone = below(self.drafts.parents, excluded)
        if gone:
            self.keep_drafts([node for node in range(len(self.drafts)) if node not in gone])
            for rows in self.rows[len(self.task.prompts) :]:
                rows.forget_from(len(self.sequence))

    def keep_drafts(self, kept: list[int]) -> None:
        """Take back all drafts but these, which ascend and include every parent of theirs, before they are tested."""
        for node in set(range(len(self.drafts))) - set(kept):
            self.statistics.drafted[max(self.drafts.proposers[node], OUTSIDE)] -= 1
        self._reduce(kept)
        for rows in self.rows:
            rows.select(self.num_settled, [0, *(node + 1 for node in kept)])
        for reader in self.readers.values():
            reader.keep_nodes(self.num_settled, kept)

    def _reduce(self, kept: Sequence[int]) -> None:
        first, drafts = self.num_settled, self.sequence[self.num_settled :]
        self.sequence[first:] = [drafts[node] for node in kept]
        self.drafts = self.drafts.only(kept, drafts)
        self._excluded.clear()
        if self._masks is not None:
            self._masks.select(first, kept)

    def drop_drafts(self) -> None:
        """Take back whatever is under test, so that a round can begin anew."""
        del self.sequence[self.num_settled :]
        self.forget_drafts()

    def settle_drafts(
        self, tokens: list[int], path: Sequence[int], num_tested: int, told: Sequence[Told] | None
    ) -> None:
        """Settle what the test of the first `num_tested` drafts emitted: a path of accepted ones, perhaps a token more.

        Drafts of a chain after accepted ones stay under test, and members forget what was rejected. Where no token
        comes after the path, who has scored its place may draft there. Whatever comes after the end of the text is
        dropped.
        """
        first, num_accepted, is_tree = self.num_settled, len(path), not self.drafts.is_chain
        proposers, num_next = self.drafts.proposers[:num_tested], len(tokens) - num_accepted
        drafts = self.sequence[first : first + num_tested]
        self._tested = drafts, proposers, path, self.drafts.parents if is_tree else None
        if is_tree:
            last = path[-1] if path else ROOT
            rejected = [proposers[node] for node in self.drafts.children(last) if node < num_tested][:1]
            accepted = [proposers[node] for node in path]
            self.drawn_at = first + 1 + last
            for rows in self.rows if not num_next else ():
                rows.move(self.drawn_at, first + num_accepted)
            self._reduce(path)
        else:
            accepted, rejected = proposers[:num_accepted], proposers[num_accepted : num_accepted + 1]
            self.drawn_at = first + num_accepted
        for reader in self.readers.values():
            if is_tree or reader.num_nodes:  # which a chain has too, where trees are drafted
                reader.keep_path(first, path)
        known = first + num_accepted - self.is_unreadable(num_accepted - 1)
        left = self.sequence[first + num_accepted :]
        kinds = ["draft accepted"] * num_accepted + ["recovered" if rejected else "bonus"] * num_next
        settled = self.settle(tokens, kinds, accepted + [OUTSIDE] * num_next, told)
        for proposer in accepted[:settled] + (rejected if settled > num_accepted else []):
            self.statistics.tested[max(proposer, OUTSIDE)] += 1
        if num_next or self.finished or known < first + num_accepted:
            self.forget_drafts()
            for reader in self.readers.values():
                reader.roll_back(min(known, self.num_settled))
        else:
            self._keep_drafts(left)

    def _keep_drafts(self, left: list[int]) -> None:
        self.sequence += left
        self.drafts = self.drafts.tail(left)
        for rows in self.rows:
            rows.forget_before(self.num_settled)
        for reader in self.readers.values():
            reader.settle(self.num_settled)

    def forget_drafts(self) -> None:
        """Drop the drafts under test, and every row: the text in front of them is another one now."""
        self.drafts = Drafts()
        self._excluded.clear()
        if self._masks is not None:
            self._masks.keep(self.num_settled)
        for rows in self.rows:
            if rows.end:
                rows.forget_all()

    def settle(self, tokens: list[int], kinds: list[str], proposers: list[int], told: Sequence[Told] | None) -> int:
        """Append tokens to the settled ones, up to the end of the text; how many there were until then."""
        drafts = self.sequence[self.num_settled :]
        del self.sequence[self.num_settled :]
        for index, (token, kind, proposer) in enumerate(zip(tokens, kinds, proposers, strict=True)):
            if self._masks is not None and drafts[index : index + 1] != [token]:
                self._masks.keep(self.num_settled)
            self.sequence.append(token)
            self.num_settled += 1
            text = self._text.push(token, may_stop=self.num_settled >= self.task.min_new_tokens)
            self._has_ended = self._text.stopped or token in self.task.stop_tokens
            owner = None if proposer < 0 else proposer
            self.events.append(Event(token, kind, owner, text, *(told[index] if told is not None else ())))
            if kind == "draft accepted":
                self.statistics.accepted[max(proposer, OUTSIDE)] += 1
            elif kind == "recovered":
                self.statistics.recovered += 1
            elif kind == "bonus":
                self.statistics.bonus += 1
            if self.finished:
                self.events[-1].text += self._text.finish()
                return index + 1
        return len(tokens)

    def finish(self) -> None:
        """Close the statistics, and give out text that was held back, where something else than its end ends it."""
        if self.events:
            self.events[-1].text += self._text.finish()
        self.statistics.emitted = self.num_settled
        self.statistics.seconds = time.perf_counter() - self._started

    def take_new_events(self) -> list[Event]:
        """The events since the last call."""
        new = self.events[self._num_delivered :]
        self._num_delivered = len(self.events)
        return new

    def take_tested(self) -> tuple[list[Draft], bool]:
        """The drafts that have been tested since the last call, and whether they are a tree."""
        (tokens, proposers, accepted, parents), self._tested = self._tested, NOTHING_TESTED
        above = [None] * len(tokens) if parents is None else parents
        verdicts = [index in accepted for index in range(len(tokens))]
        members = [None if proposer < 0 else proposer for proposer in proposers]
        tested = [Draft(*draft) for draft in zip(tokens, members, verdicts, above, strict=True)]
        return tested, any(draft.parent is not None for draft in tested)

    def note_status(self, status: int, *, emitted: bool) -> None:
        """Keep the status bits; a distribution without any token fails the request with a RuntimeError."""
        if not status and emitted:
            return
        flags = Status(status)
        self.statistics.status |= flags
        if not emitted:
            names = ", ".join(flag.name or str(flag.value) for flag in Status if flag and flag in flags)
            with self.failing_alone():
                raise RuntimeError(f"no token can be drawn at generated token {self.num_settled}: {names}")

    @contextmanager
    def failing_alone(self) -> Iterator[None]:
        """What is raised within concerns this request alone."""
        try:
            yield
        except RequestError:
            raise
        except Exception as error:
            raise RequestError(self, error) from error
