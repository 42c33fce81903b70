"""One drafter drafts, all members score, the ensemble verifies.

Source: Fu et al., ICML 2025, section 3.2; with an outside drafter, Leviathan et al., ICML 2023.
"""

from __future__ import annotations

from specens.decoding.batch import Batch
from specens.decoding.draft_lens import ByConfidence, chain_lens, confidence
from specens.decoding.draws import draw
from specens.decoding.request import OUTSIDE, Request
from specens.decoding.scorer import score_all
from specens.decoding.verification import verify
from specens.schedules.plan import Plan, one_drafter


class Fixed:
    """The drafter, a member or not, drafts its draft_len tokens in every round.

    A round without a rejection also emits a bonus token, from the target after the last draft. The other members have
    scored that place; the drafter has not, and where it has a weight it forwards its last draft for it. Counting with g
    drafts, acceptance rate a, the drafter's forwards costing c and all others' together 1: a round costs 1 + c g and
    emits (1 - a^g) / (1 - a) tokens. With the bonus it costs c a^g more and emits a^g more. A round gives less than g
    tokens for more than c g, so one more token for c always makes the mean cost of a token smaller. (Without the bonus
    the drafter would forward its last draft all the same, at the start of the next round, only to draft there.)

    Where there was nothing to draft, a round emits one token from the target.

    With a plan of trees the drafter proposes one, and after the accepted path always comes one more token: all members
    read every node, the drafter its last level only where its distribution is a part of the target.
    """

    speculates = True

    def __init__(self, plan: Plan) -> None:
        self.index, self.drafter = one_drafter(plan, "fixed")
        self.draft_len = plan.draft_lens[max(self.index, 0)]
        if isinstance(self.draft_len, ByConfidence) and not self.drafter.has_probabilities:
            raise ValueError(
                f"draft_lens: expected no ByConfidence, since drafts of {type(self.drafter).__name__} have no "
                f"probability; got {self.draft_len}"
            )
        self.tree = plan.tree
        self.drafting = self.drafter.indices if self.index == OUTSIDE else (self.index,)
        self.adds_bonus = not plan.replaces  # an assistant has no say after a chain [Wang et al., 2025]

    def run_round(self, batch: Batch) -> None:
        """Propose, score, verify, commit."""
        requests = batch.requests
        if self.tree is None:
            lens = chain_lens(self.draft_len, requests, self.index)
            self.drafter.propose(batch, requests, lens, **confidence(self.draft_len))
        else:
            self.drafter.propose_trees(batch, requests, self.tree)
        for request in requests:
            request.drop_excluded_drafts()
        batch.end_phase("propose", requests)

        own = [batch.scorer_of(index) for index in self.drafting]
        work = [(scorer, requests) for scorer in batch.scorers if scorer not in own]
        if self.tree is not None:
            work += [(scorer, [request for request in requests if scorer.counts_for(request)]) for scorer in own]
        score_all(work)
        self.drafter.observe(requests)
        batch.end_phase("score", requests)

        undrafted = [request for request in requests if not request.drafts.parents]
        verify(requests, bonus=self.adds_bonus)
        batch.end_phase("verify", requests)
        self._add_tokens(batch, requests if self.adds_bonus else undrafted, undrafted)

    def _add_tokens(self, batch: Batch, requests: list[Request], undrafted: list[Request]) -> None:
        """Draw a token after chains that were fully accepted and have none yet, and where there was no chain."""
        open_ended = [request for request in requests if self._awaits_token(request)]
        if not open_ended:
            return
        if self.index != OUTSIDE:
            batch.scorer_of(self.index).score(open_ended)
        batch.end_phase("score", open_ended)
        draw([request for request in open_ended if request not in undrafted], "bonus")
        draw([request for request in open_ended if request in undrafted], "standard")
        batch.end_phase("verify", open_ended)

    def _awaits_token(self, request: Request) -> bool:
        """Whether all members but the drafter have scored the first place that is not settled."""
        for index in request.counted:
            if index != self.index and request.rows[index].end <= request.num_settled:
                return False
        return not request.finished
