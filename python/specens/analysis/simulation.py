"""A generation without models: who would forward how many tokens, by the rules of each schedule.

The rules are those of `specens.schedules`; only the tokens are left out. A draft at a position of the text is accepted
with a chance that is given.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from specens.decoding.statistics import OUTSIDE


class Simulation:
    """One text that is generated from its first token to its last one.

    groups: the indices that are read together. acceptance: of each member as a drafter, its chance at every position.
    reads: of each group the numbers of tokens that its forwards read, the one that reads the prompt left out.
    steps: one after the other what goes on at the same time, where each group has a device of its own: of each group
    the numbers of tokens that it reads, None for its prompt.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[int]],
        acceptance: Sequence[Sequence[float]],
        counted: Sequence[int],
        random_numbers: random.Random,
    ) -> None:
        self.num_tokens = len(acceptance[0])
        self.reads: list[list[int]] = [[] for _ in groups]
        self.steps: list[dict[int, list[int | None]]] = []
        self.num_tested = 0
        self.num_accepted = 0
        self._acceptance = acceptance
        self._uniforms = random_numbers
        self._group_of = {index: number for number, group in enumerate(groups) for index in group}
        self._counted = sorted({self._group_of[index] for index in counted})
        self._settled = 0
        self._drafts: list[int] = []  # their proposers
        self._ends = [0] * len(groups)  # the positions that are scored
        self._seen: list[int | None] = [None] * len(groups)  # the tokens that are read; None before the prompt

    def has_read(self, group: int) -> bool:
        """Whether a group has read its prompt, by a forward of its own."""
        return self._seen[group] is not None

    def standard(self) -> None:
        """Every group with a weight reads every token."""
        while self._remaining:
            self.steps.append({})
            for group in self._counted:
                self._score(group)
            self._settle(1)

    def fixed(self, drafter: int, draft_len: int) -> None:
        """One member drafts, all score."""
        own = self._group_of[drafter]
        while self._remaining:
            self.steps.append({})
            self._propose(drafter, draft_len)
            self.steps.append({})
            for group in range(len(self.reads)):
                if group != own:
                    self._score(group)
            if self._test(bonus=own not in self._counted) and self._remaining:
                self.steps.append({})
                self._score(own)
                self._settle(1)

    def parallel(self, drafter: int, draft_len: int) -> None:
        """One member drafts on while the others score what it has drafted before."""
        own = self._group_of[drafter]
        while self._remaining:
            self.steps.append({})
            for group in self._counted:
                if group != own:
                    self._score(group)
            self._propose(drafter, draft_len)
            self._test(bonus=False)

    def looked_up(self, found: Sequence[tuple[int, int]], draft_len: int) -> None:
        """A lookup drafts, all score. found: how many tokens it drafts at every position, and how many are right."""
        while self._remaining:
            known, right = found[self._settled]
            count = min(known, draft_len, self._remaining)
            accepted = min(right, count)
            self._drafts = [OUTSIDE] * count
            self.steps.append({})
            for group in range(len(self.reads)):
                self._score(group)
            self.num_tested += min(accepted + 1, count)
            self.num_accepted += accepted
            self._settle(min(accepted + 1, self._remaining))

    def alternate(self, proposers: Sequence[int], draft_lens: Sequence[int], first: int | None = None) -> None:
        """The group that lags behind scores, and its proposer drafts on; `first` does so after a rejection."""
        turns = [-1] * len(self.reads)
        turn = 0
        while self._remaining:
            group = min(
                range(len(self.reads)),
                key=lambda own: (
                    max(self._ends[own], self._settled),
                    proposers[own] != first,
                    -draft_lens[proposers[own]],
                    turns[own],
                ),
            )
            turns[group] = turn
            turn += 1
            self.steps.append({})
            self._score(group)
            self._test(bonus=False)
            if self._ends[group] > self._settled:
                self._propose(proposers[group], draft_lens[proposers[group]])

    @property
    def _remaining(self) -> int:
        return self.num_tokens - self._settled

    def _score(self, group: int) -> None:
        length = self._settled + len(self._drafts)
        if max(self._ends[group], self._settled) > length:
            return
        seen = self._seen[group]
        if seen is not None:
            self.reads[group].append(length - seen)
        self.steps[-1].setdefault(group, []).append(None if seen is None else length - seen)
        self._seen[group], self._ends[group] = length, length + 1

    def _propose(self, index: int, draft_len: int) -> None:
        for _ in range(min(draft_len, self._remaining - len(self._drafts))):
            self._score(self._group_of[index])
            self._drafts.append(index)

    def _test(self, *, bonus: bool) -> bool:
        """Test what all counted groups have scored; whether all drafts were accepted and no token came after."""
        scored = min(self._ends[group] for group in self._counted) - self._settled
        count = min(len(self._drafts), scored)
        if count <= 0:
            return False
        for index in range(count):
            chance = self._acceptance[self._drafts[index]][self._settled + index]
            self.num_tested += 1
            if self._uniforms.random() >= chance:
                self._settle(index + 1)
                return False
            self.num_accepted += 1
        if bonus and scored > count and self._remaining > count:
            self._settle(count + 1)
            return False
        del self._drafts[:count]
        self._settled += count
        return not self._drafts

    def _settle(self, count: int) -> None:
        """Settle tokens of which the last one has been read by nobody; the drafts and all that is scored are void."""
        self._settled += count
        self._drafts.clear()
        self._ends = [0] * len(self._ends)
        self._seen = [None if seen is None else min(seen, self._settled - 1) for seen in self._seen]
