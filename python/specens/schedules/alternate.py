"""Members draft for each other [Fu et al., ICML 2025, sections 3.3 and 3.4, algorithm 2]."""

from __future__ import annotations

from collections.abc import Sequence

from specens.decoding.batch import Batch
from specens.decoding.draft_lens import ByAcceptance, chain_lens, confidence, most_drafts
from specens.decoding.draws import draw
from specens.decoding.request import Request
from specens.decoding.scorer import Scorer
from specens.decoding.verification import num_scored, verify
from specens.drafters import MemberDrafter
from specens.schedules.plan import Plan, member_that_drafts


class Alternate:
    """In each turn the member that lags behind reads the drafts of the others, and drafts on behind them.

    A position is verified as soon as all members have scored it. A member that scores a chain knows its own
    distribution after it, so the first token that it adds costs no forward: while drafts are accepted, n members with
    draft_lens 1 need one forward for one token, where `standard` needs n. A rejection makes all of them begin again at
    the same place. With two members and acceptance rate a that is 2 - a forwards a token, so 2 / (2 - a) times the
    speed of `standard` at equal costs, and never more forwards than `standard`.

    With a plan of trees, which the paper has none of, the member whose turn it is goes on with one from its own
    distribution after the accepted path, so the first level costs no forward. The others read all nodes before
    anything is tested, and draft nothing below them: a tree below each leaf would be too large. So with three members
    or more the turns that only read are lost to drafting, and a chain, which each of them makes longer, may be better.
    Where a path ends at a leaf that its drafter has not read, there is no bonus token, and its last reader drafts on;
    after any other end all begin again at the same place. A tree of one level never costs more forwards than
    `standard`; each level more costs its drafter one.

    The paper fixes who proposes after a rejection, its default proposer: the plan's `proposes_first`. Whose turn it is
    follows from a request's own text alone, so a batch around it changes nothing.
    """

    speculates = True

    def __init__(self, plan: Plan) -> None:
        if plan.num_members < 2:
            raise ValueError(f"schedule: expected two members or more for 'alternate', got {plan.num_members}")
        member_that_drafts(plan, "alternate")
        if any(isinstance(length, ByAcceptance) for length in plan.draft_lens):
            raise ValueError(
                "draft_lens: expected no ByAcceptance under schedule 'alternate', whose rates it is not for"
            )
        self.draft_lens = plan.draft_lens
        self.tree = plan.tree
        self.first = plan.proposes_first

    def run_round(self, batch: Batch) -> None:
        """Score, verify and commit, and propose: one turn of the member that most requests wait for."""
        waiting: dict[int, list[Request]] = {}
        for request in batch.requests:
            waiting.setdefault(self._next(batch, request).index, []).append(request)
        index, requests = max(waiting.items(), key=lambda item: len(item[1]))
        scorer = batch.scorers[index]
        for request in requests:
            request.last_turns[index] = request.num_turns
            request.num_turns += 1
        scorer.score(requests)
        batch.end_phase("score", requests)

        verify(requests)
        batch.end_phase("verify", requests)

        proposer = self._proposer(scorer, requests[0])
        accepted = [request for request in requests if request.rows[proposer].end > request.num_settled]
        self._propose(batch, proposer, accepted)
        batch.end_phase("propose", requests)

        # A member's distribution may have no token where the target has: then nothing can be drafted.
        draw([one for one in requests if not one.finished and not len(one.drafts) and num_scored(one)], "standard")
        batch.end_phase("verify", requests)

    def _propose(self, batch: Batch, proposer: int, requests: Sequence[Request]) -> None:
        drafter, length = MemberDrafter(proposer), self.draft_lens[proposer]
        if self.tree is None:
            drafter.propose(batch, requests, chain_lens(length, requests, proposer), **confidence(length))
        else:
            drafter.propose_trees(batch, [request for request in requests if not len(request.drafts)], self.tree)

    def _next(self, batch: Batch, request: Request) -> Scorer:
        """Who has scored the fewest positions.

        After a rejection all are equal: then the member goes that was named, or else that with the longest chains,
        since it is the one whose forwards are cheap; among equal ones the one whose last turn is longest ago, so that
        the turns of a batch, in which some requests have had a rejection and others not, stay the same. A tree is read
        by those first whom its test waits for.
        """

        def order(scorer: Scorer) -> tuple[int, bool, int, int]:
            index = self._proposer(scorer, request)
            scored = max(request.rows[index].end, request.num_settled)
            last_turn = request.last_turns.get(scorer.index, -1)
            longest = most_drafts(self.draft_lens[index]) if self.tree is None else 0
            return scored, index != self.first, -longest, last_turn

        waited_for = batch.scorers
        if self.tree is not None and len(request.drafts):
            tested = request.num_settled + request.drafts.num_tested_rows
            counted = [one for one in batch.scorers if one.counts_for(request)]
            waited_for = [one for one in counted if request.rows[one.indices[0]].end < tested] or waited_for
        return min(waited_for, key=order)

    def _proposer(self, scorer: Scorer, request: Request) -> int:
        """Which of the members that share weights drafts: the one that was named, or that with the largest weight."""
        if len(scorer.indices) == 1:
            return scorer.indices[0]
        if self.first is not None and self.first in scorer.indices:
            return self.first
        weights = getattr(request.task.ensemble, "weights", None)
        return max(scorer.indices, key=lambda index: 0.0 if weights is None else abs(weights[index]))
