"""One member drafts, all score, the ensemble verifies [Fu et al., Speculative Ensemble, ICML 2025, section 3.2]."""

from __future__ import annotations

from specens.request import Request
from specens.schedules.plan import Plan
from specens.schedules.propose import propose


class Fixed:
    """Member `drafter` drafts its draft_len tokens in every round.

    A round without a rejection also emits a bonus token, from the target behind the last draft. The other members have
    scored that place; the drafter has not, and forwards its last draft for it. Counting with g drafts, acceptance rate
    a, the drafter's forwards costing c and all others' together 1: a round costs 1 + c g and emits
    (1 - a^g) / (1 - a) tokens. With the bonus it costs c a^g more and emits a^g more. A round gives less than g tokens
    for more than c g, so one more token for c always makes the mean cost of a token smaller. (Without the bonus the
    drafter would forward its last draft all the same, at the start of the next round, only to draft there.)
    """

    speculates = True

    def __init__(self, plan: Plan) -> None:
        if plan.num_members < 2:
            raise ValueError(f"schedule: expected two members or more for 'fixed', got {plan.num_members}")
        self.drafter = plan.drafter
        self.draft_len = plan.draft_lens[plan.drafter]

    def run_round(self, request: Request) -> None:
        """Propose, score, verify, commit."""
        members, statistics, start = request.members, request.statistics, request.num_settled
        drafts, draft_logits = propose(request, self.drafter, self.draft_len)
        statistics.end_phase("propose")

        logits = [
            draft_logits if index == self.drafter else member.score(request.sequence, len(drafts) + 1)[:, : len(drafts)]
            for index, member in enumerate(members)
        ]
        statistics.end_phase("score")

        num_accepted = request.verify(logits, drafts, self.drafter)
        for member in members:
            member.roll_back(start + num_accepted)
        statistics.end_phase("verify")

        if num_accepted == len(drafts) and not request.finished:
            rows = [member.score_next(request.sequence) for member in members]
            statistics.end_phase("score")
            request.draw(rows, "bonus", step=len(drafts))
            statistics.bonus += 1
            statistics.end_phase("verify")
