"""One generation under way: what is settled, what is drafted, and the randomness of each round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from specens.draft_tree import DraftTree
from specens.member import Member
from specens.statistics import Statistics
from specens.text_stream import TextStream
from specens_kernels import (
    Contrastive,
    LogitMixture,
    Mixture,
    Sampling,
    Status,
    Verdict,
    sample,
    target_logprobs,
    verify_chain,
    verify_tree,
)

NEXT_TOKEN_STREAM = 1

Ensemble = Mixture | LogitMixture | Contrastive


@dataclass
class Event:
    """One emitted token.

    kind: "draft accepted", "recovered" (drawn after a rejection), "bonus" (drawn after a fully accepted chain) or
        "standard" (drawn without speculation). proposer: the member whose draft it was, else None.
    text: what the token adds to the text. logprob: under the target distribution, None unless asked for.
    """

    token: int
    kind: str
    proposer: int | None
    text: str
    logprob: float | None = None

    def to_dict(self) -> dict:
        """The fields as plain values for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Task:
    """What a generation has to do: the target distribution, the seed and where to stop."""

    ensemble: Ensemble | None
    sampling: Sampling
    seed: int
    max_new_tokens: int
    stop_tokens: frozenset[int]
    logprobs: bool


class Request:
    """The state that a schedule works on, and its two operations on it: draw or verify, then settle.

    members: serve the places of the ensemble in order. sequence: the settled tokens, then the drafts under test.

    Coins belong to a seed, the position of the round's first token, the offset in the round and a stream; a round emits
    at least one token, so no coin is used by two rounds, nor by a draft and its test.
    """

    def __init__(self, members: Sequence[Member], task: Task, statistics: Statistics, text: TextStream) -> None:
        self.members = members
        self.task = task
        self.statistics = statistics
        self.sequence: list[int] = []
        self.num_settled = 0
        self.events: list[Event] = []
        self._text = text
        self._num_delivered = 0
        self._seeds = torch.tensor([task.seed])

    @property
    def remaining(self) -> int:
        """How many tokens may still be settled."""
        return self.task.max_new_tokens - self.num_settled

    @property
    def finished(self) -> bool:
        """Whether the text has its end of sequence, or all the tokens that were asked for."""
        return self.remaining <= 0 or (self.num_settled > 0 and self.ends_at(self.sequence[self.num_settled - 1]))

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, at temperature 0."""
        return float(self.task.sampling.temperature) == 0.0

    def ends_at(self, token: int) -> bool:
        """Whether a text stops with this token."""
        return token in self.task.stop_tokens

    def draft(self, index: int, logits: Tensor, step: int) -> int:
        """Draw a draft token from one member's own distribution, logits [1, vocab], and append it to the sequence."""
        seeds, positions = self._coin_seeds(logits), self._positions(logits)
        draw = sample([logits], sampling=self.task.sampling, seeds=seeds, positions=positions, step=step)
        token = int(draw.tokens)
        self._check(token >= 0, draw.status)
        self.sequence.append(token)
        self.statistics.drafted[index] += 1
        return token

    def draw_siblings(self, logits: Tensor, count: int, first_node: int) -> list[int]:
        """Draw draft tokens from one member's distribution, logits [vocab], each without those before it.

        first_node: the number of the first sibling in its tree. -1 stands where no probability is left.
        """
        seeds, positions = self._coin_seeds(logits), self._positions(logits)
        left = target_logprobs([logits[None]], sampling=self.task.sampling)
        tokens = []
        for node in range(first_node, first_node + count):
            tokens.append(int(sample([left], seeds=seeds, positions=positions, step=node).tokens))
            if tokens[-1] >= 0:
                left[0, tokens[-1]] = float("-inf")
        return tokens

    def draw(self, logits: Sequence[Tensor], kind: str, step: int = 0) -> None:
        """Draw a token from the target distribution, logits [1, vocab] of every place, and settle it."""
        device = logits[0].device
        draw = sample(
            [row.to(device) for row in logits],
            ensemble=self.task.ensemble,
            sampling=self.task.sampling,
            seeds=self._coin_seeds(logits[0]),
            positions=self._positions(logits[0], behind=step),
            step=step,
            stream=NEXT_TOKEN_STREAM,
            logprobs=self.task.logprobs,
        )
        token = int(draw.tokens)
        self._check(token >= 0, draw.status)
        self._settle([token], [kind], None, draw.logprobs)

    def verify(self, logits: Sequence[Tensor], drafts: list[int], proposer: int) -> int:
        """Test the drafts at the end of the sequence and settle what the test emits; the number of accepted ones.

        logits: [1, len(drafts), vocab] of every place; proposer: the place whose distribution the drafts came from.
        """
        device = logits[0].device
        verdict = verify_chain(
            [rows.to(device) for rows in logits],
            torch.tensor([drafts], device=device),
            ensemble=self.task.ensemble,
            sampling=self.task.sampling,
            drafter=proposer,
            seeds=self._coin_seeds(logits[0]),
            positions=self._positions(logits[0]),
            logprobs=self.task.logprobs,
        )
        num_accepted, tokens = self._emitted(verdict)
        self._check(len(tokens) > num_accepted or num_accepted == len(drafts), verdict.status)
        self._settle_accepted(tokens, num_accepted, "recovered", proposer, verdict.logprobs)
        self.statistics.tested[proposer] += min(num_accepted + 1, len(drafts))
        return num_accepted

    def verify_tree(self, logits: Sequence[Tensor], draft: DraftTree, proposer: int, rule: str) -> list[int]:
        """Test a draft tree behind the sequence and settle what the test emits; the accepted nodes that were settled.

        logits: [1, nodes + 1, vocab] of every place; proposer: the place that drafted. What the test emits behind the
        end of the text is dropped.
        """
        device = logits[0].device
        verdict = verify_tree(
            [rows.to(device) for rows in logits],
            ensemble=self.task.ensemble,
            sampling=self.task.sampling,
            rule=rule,
            **draft.test_arguments(proposer, device),
            seeds=self._coin_seeds(logits[0]),
            positions=self._positions(logits[0]),
            logprobs=self.task.logprobs,
        )
        num_accepted, tokens = self._emitted(verdict)
        self._check(len(tokens) > num_accepted, verdict.status)
        assert verdict.path is not None
        path = verdict.path[0, :num_accepted].tolist()
        at_leaf = bool(path) and draft.tree.first_child[path[-1]] < 0
        tokens = self._cut(tokens)
        path = path[: len(tokens)]
        self._settle_accepted(tokens, len(path), "bonus" if at_leaf else "recovered", proposer, verdict.logprobs)
        self.statistics.tested[proposer] += len(path) + (len(tokens) > len(path) and not at_leaf)
        return path

    def take_new_events(self) -> list[Event]:
        """The events since the last call."""
        new = self.events[self._num_delivered :]
        self._num_delivered = len(self.events)
        return new

    @staticmethod
    def _emitted(verdict: Verdict) -> tuple[int, list[int]]:
        return int(verdict.num_accepted), [token for token in verdict.tokens[0].tolist() if token >= 0]

    def _cut(self, tokens: list[int]) -> list[int]:
        """Up to the first end of sequence, and no more than may still be settled."""
        end = next((place + 1 for place, token in enumerate(tokens) if self.ends_at(token)), len(tokens))
        return tokens[: min(end, self.remaining)]

    def _settle_accepted(
        self, tokens: list[int], num_accepted: int, next_kind: str, proposer: int, logprobs: Tensor | None
    ) -> None:
        """Settle accepted drafts and the token behind them, if there is one, and count them."""
        num_next = len(tokens) - num_accepted
        self.statistics.accepted[proposer] += num_accepted
        if next_kind == "bonus":
            self.statistics.bonus += num_next
        else:
            self.statistics.recovered += num_next
        self._settle(tokens, ["draft accepted"] * num_accepted + [next_kind] * num_next, proposer, logprobs)

    def _settle(self, tokens: list[int], kinds: list[str], proposer: int | None, logprobs: Tensor | None) -> None:
        del self.sequence[self.num_settled :]
        self.sequence += tokens
        self.num_settled = len(self.sequence)
        values = [None] * len(tokens) if logprobs is None else logprobs.flatten().tolist()
        for token, kind, logprob in zip(tokens, kinds, values[: len(tokens)], strict=True):
            owner = proposer if kind == "draft accepted" else None
            self.events.append(Event(token, kind, owner, self._text.push(token), logprob))
        if self.finished:
            self.events[-1].text += self._text.finish()

    def _coin_seeds(self, logits: Tensor) -> Tensor:
        return self._seeds.to(logits.device)

    def _positions(self, logits: Tensor, behind: int = 0) -> Tensor:
        """The position of the round's first token: `behind` settled tokens before the next one."""
        return torch.tensor([self.num_settled - behind], device=logits.device)

    def _check(self, emitted: bool, status: Tensor) -> None:
        """Keep the status bits; a distribution without any token ends the generation with an error."""
        flags = Status(int(status))
        self.statistics.status |= flags
        if not emitted:
            names = ", ".join(flag.name or str(flag.value) for flag in Status if flag and flag in flags)
            raise RuntimeError(f"no token can be drawn at generated token {self.num_settled}: {names}")
