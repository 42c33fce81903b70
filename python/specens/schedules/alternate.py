"""Two members draft for each other [Fu et al., Speculative Ensemble, ICML 2025, sections 3.3 and 3.4]."""

from __future__ import annotations

from specens.request import Request
from specens.schedules.plan import Plan
from specens.schedules.propose import propose


class Alternate:
    """The member that verifies a chain knows its own distribution behind it, and opens the next chain from there.

    While drafts are accepted, one forward tests a chain and proposes the start of the next: with draft_lens (1, 1) one
    forward for one token, where `standard` needs two. A rejection costs one forward, since the member that opens the
    next chain then knows nothing behind the recovered token. With acceptance rate a that is 2 - a forwards a token, so
    2 / (2 - a) times the speed of `standard` at equal costs, and never more forwards than `standard`.
    """

    speculates = True

    def __init__(self, plan: Plan) -> None:
        if plan.num_members != 2:
            raise ValueError(f"schedule: expected two members for 'alternate', got {plan.num_members}")
        self.draft_lens = plan.draft_lens
        self.proposer = 0 if self.draft_lens[0] >= self.draft_lens[1] else 1

    def run_round(self, request: Request) -> None:
        """Propose, score, verify, commit."""
        proposer, verifier, start = self.proposer, 1 - self.proposer, request.num_settled
        drafts, draft_logits = propose(request, proposer, self.draft_lens[proposer])
        request.statistics.end_phase("propose")

        scored = request.members[verifier].score(request.sequence, len(drafts) + 1)
        request.statistics.end_phase("score")

        logits = {proposer: draft_logits, verifier: scored[:, : len(drafts)]}
        num_accepted = request.verify([logits[0], logits[1]], drafts, proposer)
        for member in request.members:
            member.roll_back(start + num_accepted)
        self.proposer = verifier if num_accepted == len(drafts) else self._opener(verifier)
        request.statistics.end_phase("verify")

    def _opener(self, verifier: int) -> int:
        """Who opens a chain after a rejection, when both members have seen the same tokens: all but the recovered one.

        Whoever opens, its forward serves as its own score of the position, so none is wasted. The member with the
        longer chains goes, since it is the one whose forwards are cheap; with equal lengths the verifier, so that a
        rejected proposer hands over and the member with the better drafts opens more chains.
        """
        if self.draft_lens[0] != self.draft_lens[1]:
            return 0 if self.draft_lens[0] > self.draft_lens[1] else 1
        return verifier
