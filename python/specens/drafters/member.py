"""A member drafts a chain from its own distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specens.request import Request
from specens.verification import draft

if TYPE_CHECKING:
    from specens.batch import Batch


class MemberDrafter:
    """Member `place` of the ensemble drafts behind the last token of each request, one forward for each draft.

    The first draft needs no forward where the member has scored its position already. A chain is cut at the number of
    tokens that may still be emitted, and ends with an end of sequence: nothing behind either could ever be used.
    """

    def __init__(self, place: int) -> None:
        self.place = place

    def propose(self, batch: Batch, requests: Sequence[Request], draft_len: int) -> None:
        """Append up to `draft_len` draft tokens to each request."""
        for _ in range(draft_len):
            requests = [request for request in requests if request.can_draft]
            if not requests:
                return
            batch.scorer_of(self.place).score(requests)
            draft(requests, self.place)
