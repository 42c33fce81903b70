"""The definition of packed rows and of slots: the same call with rows padded to [batch, draft_len + 1]."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specens_kernels.arguments import Draft, Target


class PaddedChain(NamedTuple):
    """Rows after num_rows, and drafts after lens, are not looked at."""

    target: Target  # member_logits [batch, rows, vocab]
    draft: Draft  # tokens [batch, draft_len], logits [batch, draft_len, vocab]
    lens: Tensor  # int64 [batch], the drafts that a request says it has
    num_rows: Tensor  # int64 [batch]
    invalid: Tensor  # bool [batch]


def padded(target: Target, draft: Draft) -> PaddedChain:
    """Pad packed rows, and fetch draft logits from their slots."""
    if target.row_offsets is not None:
        return _padded_rows(target, draft, target.row_offsets.long())
    batch, draft_len = draft.tokens.shape
    lens = torch.full((batch,), draft_len, dtype=torch.int64, device=draft.tokens.device)
    lens = lens if draft.lens is None else draft.lens.long()
    num_rows = lens + (target.member_logits[0].shape[1] - draft_len)
    invalid = (lens < 0) | (lens > draft_len) | _bad_slots(draft)
    return PaddedChain(target, _from_slots(draft), lens, num_rows, invalid)


def _padded_rows(target: Target, draft: Draft, offsets: Tensor) -> PaddedChain:
    first, end = offsets[:-1], offsets[1:]
    batch, total, device = len(first), target.member_logits[0].shape[0], offsets.device
    packed_drafts = draft.tokens.dim() == 1
    bonus_each = int(packed_drafts and draft.tokens.shape[0] != total)
    num_rows = end - first
    lens = num_rows - bonus_each if packed_drafts else (num_rows - 1).clamp(min=0)
    lens = lens if draft.lens is None else draft.lens.long()
    invalid = (lens < 0) | (lens > draft.draft_len) | (num_rows < lens) | (num_rows > lens + 1)
    invalid = invalid | (first < 0) | (end > total) | _bad_slots(draft)

    def rows_of(packed: Tensor, begin: Tensor, width: int) -> Tensor:
        if len(packed) == 0:
            return packed.new_zeros(batch, width, *packed.shape[1:])
        return packed[(begin[:, None] + torch.arange(width, device=device)).clamp(0, len(packed) - 1)]

    width = draft.draft_len + 1
    members = [rows_of(logits, first, width) for logits in target.member_logits]
    allowed = None if target.allowed is None else rows_of(target.allowed, first, width)
    if packed_drafts:
        first_draft = first - bonus_each * torch.arange(batch, device=device)
        invalid = invalid | (first_draft < 0) | (first_draft + lens > draft.tokens.shape[0])
        draft = draft._replace(tokens=rows_of(draft.tokens, first_draft, draft.draft_len))
        if draft.drafters is not None:
            draft = draft._replace(drafters=rows_of(draft.drafters, first_draft, draft.draft_len))
        if draft.logits is not None and draft.slots is None:
            draft = draft._replace(logits=rows_of(draft.logits, first_draft, draft.draft_len))
    target = target._replace(member_logits=members, allowed=allowed)
    return PaddedChain(target, _from_slots(draft), lens, num_rows, invalid)


def _bad_slots(draft: Draft) -> Tensor | bool:
    if draft.slots is None or draft.logits is None:
        return False
    return (draft.slots < 0) | (draft.slots >= draft.logits.shape[0])


def _from_slots(draft: Draft) -> Draft:
    if draft.slots is None or draft.logits is None:
        return draft
    kept = draft.logits if draft.logits.shape[0] > 0 else draft.logits.new_zeros(1, *draft.logits.shape[1:])
    slots = draft.slots.long().clamp(0, kept.shape[0] - 1)
    return draft._replace(logits=kept[slots][:, : draft.draft_len], slots=None)
