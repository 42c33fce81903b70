"""A member drafts a chain from its own distribution."""

from __future__ import annotations

import torch
from torch import Tensor

from specens.request import Request


def propose(request: Request, index: int, draft_len: int) -> tuple[list[int], Tensor]:
    """Let member `index` draft up to `draft_len` tokens behind the settled ones, one forward for each.

    The first needs no forward where the member knows its distribution already. The chain is cut at the number of tokens
    that may still be emitted, and ends with an end of sequence: nothing behind either could ever be used.
    Returns the drafts, and the logits [1, drafts, vocab] that they were drawn from.
    """
    drafts: list[int] = []
    rows = []
    for step in range(min(draft_len, request.remaining)):
        logits = request.members[index].score_next(request.sequence)
        drafts.append(request.draft(index, logits, step))
        rows.append(logits)
        if request.ends_at(drafts[-1]):
            break
    return drafts, torch.stack(rows, dim=1)
