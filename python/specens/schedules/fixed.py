"""One member drafts, all score, the ensemble verifies [Fu et al., Speculative Ensemble, ICML 2025, section 3.2]."""

from __future__ import annotations

from specens.batch import Batch
from specens.drafters import MemberDrafter
from specens.request import Request
from specens.schedules.plan import Plan
from specens.scorer import Scorer
from specens.verification import draw, verify


class Fixed:
    """Member `drafter` drafts its draft_len tokens in every round.

    A round without a rejection also emits a bonus token, from the target behind the last draft. The other members have
    scored that place; the drafter has not, and where it has a weight it forwards its last draft for it. Counting with g
    drafts, acceptance rate a, the drafter's forwards costing c and all others' together 1: a round costs 1 + c g and
    emits (1 - a^g) / (1 - a) tokens. With the bonus it costs c a^g more and emits a^g more. A round gives less than g
    tokens for more than c g, so one more token for c always makes the mean cost of a token smaller. (Without the bonus
    the drafter would forward its last draft all the same, at the start of the next round, only to draft there.)
    """

    speculates = True

    def __init__(self, plan: Plan) -> None:
        if plan.num_members < 2:
            raise ValueError(f"schedule: expected two members or more for 'fixed', got {plan.num_members}")
        self.drafter = MemberDrafter(plan.drafter)
        self.draft_len = plan.draft_lens[plan.drafter]
        self.rule = plan.rule
        self.adds_bonus = not plan.replaces  # an assistant has no say behind a chain [Wang et al., 2025]

    def run_round(self, batch: Batch) -> None:
        """Propose, score, verify, commit."""
        requests = batch.requests
        self.drafter.propose(batch, requests, self.draft_len)
        batch.end_phase("propose", requests)

        own = batch.scorer_of(self.drafter.place)
        for scorer in batch.scorers:
            if scorer is not own:
                scorer.score(requests)
        batch.end_phase("score", requests)

        verify(requests, bonus=self.adds_bonus, rule=self.rule)
        batch.end_phase("verify", requests)
        if self.adds_bonus:
            self._add_bonus(batch, requests, own)

    def _add_bonus(self, batch: Batch, requests: list[Request], own: Scorer) -> None:
        """Draw a token behind the chains that were fully accepted, where the drafter has a weight."""
        others = [place for place in requests[0].counted if place != self.drafter.place]
        accepted = [
            request
            for request in requests
            if not request.finished and all(request.rows[place].end > request.num_settled for place in others)
        ]
        if accepted:
            own.score(accepted)
            batch.end_phase("score", accepted)
            draw(accepted, "bonus")
            batch.end_phase("verify", accepted)
