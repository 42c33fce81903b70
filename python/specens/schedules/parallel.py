"""The drafter goes on from drafts that nobody has verified, while the other members verify them.

Sources: Liu et al., PEARL, ICLR 2025; McDanel, AMUSD, 2024.
"""

from __future__ import annotations

from specens.decoding.batch import Batch
from specens.decoding.draft_lens import ByAcceptance, chain_lens, confidence
from specens.decoding.draws import draw
from specens.decoding.scorer import scoring
from specens.decoding.verification import verify
from specens.drafters import DraftModel
from specens.schedules.plan import Plan, one_drafter


class Parallel:
    """In each round the other members read all drafts that there are, while the drafter adds its draft_len to them.

    After a rejection there are none: then the others read the last token, and test the first of the new drafts. After
    that they test those that they have read and the first of the new ones, whose place they have scored with them, so
    no bonus token is drawn; the drafts after it stay under test, where all before it are accepted, else they are lost.

    Counting with g drafts, acceptance rate a, the drafter's forwards costing c and the others' 1 at the same time: a
    round costs max(1, c g) and emits (1 - a^g) / ((1 - a) (1 + a - a^g)) tokens (`decoding.ideal`), so that g = 1 / c
    is the length to try first. Each rejection costs the drafts of two rounds. It pays where the drafter has a device, a
    process or a machine of its own; where all share one, rounds cost 1 + c g, and `fixed` emits more for that.

    AMUSD's drafter goes on until the verdict is there. Here its tokens are counted, so that a seed is a text on any
    clock.
    """

    speculates = True

    def __init__(self, plan: Plan) -> None:
        if not isinstance(plan.drafter, int | DraftModel):
            kind = type(plan.drafter).__name__
            raise ValueError(f"drafter: expected a member or a DraftModel under schedule 'parallel', got a {kind}")
        self.index, self.drafter = one_drafter(plan, "parallel")
        self.draft_len = plan.draft_lens[max(self.index, 0)]
        if isinstance(self.draft_len, ByAcceptance):
            raise ValueError(
                "draft_lens: expected no ByAcceptance under schedule 'parallel', whose rates it is not for"
            )

    def run_round(self, batch: Batch) -> None:
        """Score and propose at the same time, verify and commit."""
        requests, own = batch.requests, batch.scorer_of(self.index)
        with scoring([(one, list(filter(one.counts_for, requests))) for one in batch.scorers if one is not own]):
            lens = chain_lens(self.draft_len, requests, self.index)
            self.drafter.propose(batch, requests, lens, **confidence(self.draft_len))
            batch.end_phase("propose", requests)
        batch.end_phase("score", requests)

        # A drafter's distribution may have no token where the target has: then nothing can be drafted.
        undrafted = [request for request in requests if not len(request.drafts)]
        verify(requests)
        draw(undrafted, "standard")
        batch.end_phase("verify", requests)
