"""What a batch's processing says of each token that it lists, summed once, on a GPU."""

from __future__ import annotations

import triton
import triton.language as tl

from specens_kernels.parts.edits import (
    END,
    ENDS,
    IN_PROMPT,
    KINDS,
    NO_KEY,
    OUTPUT,
    OUTPUT_SHIFT,
    PROMPT,
    EditView,
    first_entry,
)
from specens_kernels.parts.launches import Launch, wait_for_launch_before
from specens_kernels.parts.sampling import size_of

ENTRIES = tl.constexpr(128)
WARPS = 4  # an entry a thread


@triton.jit
def _edits_kernel(
    edits,  # EditView, its sums and marks written
    DEPENDENT: tl.constexpr,
):
    wait_for_launch_before(DEPENDENT)
    request = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
    used = entry < edits.entries
    position = request * edits.entries + entry
    key = tl.load(edits.keys + position, mask=used, other=NO_KEY)
    before = tl.load(edits.keys + position - 1, mask=used & (entry > 0), other=NO_KEY)
    token = key // KINDS
    leads = used & (key < NO_KEY) & (token != before // KINDS)
    after_bias = first_entry(edits, request, token * KINDS + PROMPT, leads)
    after_prompt = first_entry(edits, request, token * KINDS + OUTPUT, leads)
    after_output = first_entry(edits, request, token * KINDS + END, leads)
    after_ends = first_entry(edits, request, token * KINDS + KINDS, leads)
    marks = (after_output - after_prompt) << OUTPUT_SHIFT
    marks |= tl.where(after_prompt > after_bias, IN_PROMPT, 0) | tl.where(after_ends > after_output, ENDS, 0)
    tl.store(edits.marks + position, marks, mask=leads)
    if edits.bias_sums is not None:
        count = tl.where(leads, after_bias - entry, 0)
        total = tl.zeros([ENTRIES], tl.float32)
        for index in range(tl.max(count, 0)):
            source = tl.load(edits.order + position + index, mask=index < count, other=0)
            values_ptr = edits.bias_values + request * size_of(edits.bias_width) + source
            total += tl.load(values_ptr, mask=index < count, other=0.0)
        tl.store(edits.bias_sums + position, total, mask=leads)


def edit_launch(edits: EditView) -> Launch:
    """A program for some entries of a request."""
    batch, entries = edits.keys.shape
    return Launch(_edits_kernel, (batch, triton.cdiv(entries, ENTRIES.value)), {"edits": edits}, WARPS)
