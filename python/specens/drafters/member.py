"""A model drafts from its own distributions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from specens.decoding.draws import Drafting
from specens.decoding.request import Request
from specens.drafters.drafter import Drafter
from specens.drafters.tree_plan import TreePlan
from specens.drafters.trees import draft_trees

if TYPE_CHECKING:
    from specens.decoding.batch import Batch


class MemberDrafter(Drafter):
    """Member `index` of the ensemble drafts after the last token of each request, one forward for each draft.

    The first draft needs no forward where the member has scored its position already. A chain is cut at the number of
    tokens that may still be emitted, and ends with an end of sequence: nothing after either could ever be used.
    """

    has_probabilities = True

    def __init__(self, index: int) -> None:
        self.proposer = index

    def propose(
        self,
        batch: Batch,
        requests: Sequence[Request],
        draft_lens: Sequence[int],
        min_probability: float = 0.0,
        hands_over: bool = False,
    ) -> None:
        """Append up to so many draft tokens to each request, none after one less probable than `min_probability`."""
        drafting, score = Drafting(self.proposer, min_probability, hands_over), batch.scorer_of(self.proposer).score
        left, most = list(requests), dict(zip(requests, draft_lens, strict=True))
        for step in range(max(draft_lens, default=0)):
            left = [request for request in left if most[request] > step and request.can_draft]
            if not left:
                return
            score(left)
            # An improbable draft itself stays: to take it back for what it is would bias the text.
            left = drafting.add(left)

    def propose_trees(self, batch: Batch, requests: Sequence[Request], plan: TreePlan) -> None:
        """Append a tree of its distributions to each request, one forward for each level."""
        draft_trees(self.proposer, partial(self.read, batch), requests, plan)

    def read(self, batch: Batch, requests: Sequence[Request]) -> None:
        """Forward what is new of the requests."""
        batch.scorer_of(self.proposer).score(requests)
