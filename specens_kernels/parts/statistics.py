"""What one pass over the logits leaves for the kernels behind it: a few numbers a row and block of the vocabulary.

A part of the target is a member of a mixture of probabilities, or the one mix of logits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specens_kernels.parts.target import FLOAT_MAX, INFINITY, DraftView, TargetView, member_weight
from specens_kernels.types import Status

NO_TOKEN = tl.constexpr(int(Status.NO_TOKEN))
MEMBER_WITHOUT_TOKEN = tl.constexpr(int(Status.MEMBER_WITHOUT_TOKEN))
DRAFT_SHIFT = tl.constexpr(2)  # of the draft's marks, behind the target's
NOWHERE = tl.constexpr(2**31 - 1)  # behind every token
NO_PLANE = -1
LARGEST_BLOCK = 4096
SMALLEST_BLOCK = 16
BLOCKS_OF_SMALL_VOCABULARIES = 8


class Statistics(NamedTuple):
    """Planes of `numbers`: a maximum for each part, a sum of powers for each part, then the others that are there."""

    numbers: Tensor  # float32 [rows, planes, blocks]
    marks: Tensor  # int32 [rows, 2, blocks]: status bits, then the most likely token for greedy requests
    blocks: int
    PARTS: tl.constexpr
    PLANES: tl.constexpr
    DRAFT_PLANE: tl.constexpr  # of the draft's maximum, its sum of powers behind it; NO_PLANE: drafts are one-hot
    PLAUSIBLE_PLANE: tl.constexpr  # of member 0's maximum, or NO_PLANE
    TOP_PLANE: tl.constexpr  # of what the most likely token is chosen by, or NO_PLANE: no request is greedy
    BLOCK_VOCAB: tl.constexpr
    BLOCK_COUNT: tl.constexpr  # power of two, >= blocks


def new_statistics(target: TargetView, draft: DraftView) -> Statistics:
    """Unwritten statistics of every row. Sizes follow from the vocabulary, so no result depends on the batch."""
    parts = len(target.logits) if target.MIXTURE.value else 1
    greedy = target.temperatures is not None or target.temperature == 0
    drafts = draft.draft_len > 0 and (
        draft.logits is not None or draft.drafters is not None or draft.drafter != NO_DRAFTER.value
    )
    planes = 2 * parts
    ...
