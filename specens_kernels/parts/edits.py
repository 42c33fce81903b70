"""What is done to logits in registers before anything else: processing, and a bit mask of the allowed tokens.

Processing edits few tokens of a row. They are listed once a request, sorted, so that a kernel finds a token's entry by
bisection; the drafts before a row, which differ from row to row, are compared one by one. Every kernel that reads
logits applies `edited` to them, so that all see the same float32 values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specens_kernels.arguments import ProcessingArguments
from specens_kernels.parts.sampling import INFINITY, LARGEST_NUMBER, any_size, parameter_number, request_number

# A key is a token and a kind of entry; those of a token stand together, in this order.
KINDS = tl.constexpr(4)
BIAS, PROMPT, OUTPUT, END = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
NO_KEY = tl.constexpr(2**31 - 1)  # after the keys of all tokens
ENTRY_MULTIPLE = 16
LARGEST_TOKEN = 2**29 - 2
IN_PROMPT, ENDS, OUTPUT_SHIFT, ONCE = tl.constexpr(1), tl.constexpr(2), tl.constexpr(2), tl.constexpr(4)  # of marks


class MaskView(NamedTuple):
    """The allowed tokens of each row: token v by bit v % 32 of word v // 32."""

    words: Tensor  # int32 [batch, steps, words], or packed rows
    stride_batch: int
    stride_step: int
    count: int  # words of a row


class PenaltyView(NamedTuple):
    """Penalties of a batch; tensors, float32 [batch], win where they are not None."""

    repetition: float
    repetitions: Tensor | None
    frequency: float
    frequencies: Tensor | None
    presence: float
    presences: Tensor | None
    drafts: Tensor | None  # int64 or int32 [batch, num_drafts], the tokens before the rows
    num_drafts: int


class EditView(NamedTuple):
    """Edits of the logits of a batch. Sums and marks stand at the first entry of a token, for all of its entries."""

    keys: Tensor  # int32 [batch, entries], rising
    order: Tensor  # int64 [batch, entries]: the place of an entry before they were sorted; logit_bias stood first
    bias_values: Tensor | None  # float32 [batch, bias_width]
    bias_width: int  # any_size
    bias_sums: Tensor | None  # float32 [batch, entries]
    marks: Tensor  # int32 [batch, entries]: IN_PROMPT, ENDS and, shifted, how often a token is in the output
    entries: int
    bisections: int  # that find an entry
    penalties: PenaltyView | None
    PENALISED: tl.constexpr
    min_tokens: int
    min_tokens_rows: Tensor | None  # int64 [batch]; wins
    HOLDS_BACK: tl.constexpr  # end tokens
    parents: Tensor | None = None  # int64 [batch, num_drafts] of trees: row i + 1 is that after draft i
    num_drafts: int = 0


def mask_view(allowed: Tensor | None) -> MaskView | None:
    """None where every token is allowed."""
    if allowed is None:
        return None
    stride_batch = allowed.stride(0) if allowed.dim() == 3 else 0
    return MaskView(allowed, stride_batch, allowed.stride(-2), allowed.shape[-1])


def penalty_view(processing: ProcessingArguments, drafts: Tensor | None) -> PenaltyView | None:
    """None where all penalties are known to be off."""
    numbers = processing.repetition_penalty, processing.frequency_penalty, processing.presence_penalty
    rows = processing.repetition_penalties, processing.frequency_penalties, processing.presence_penalties
    if numbers == (1.0, 0.0, 0.0) and rows == (None, None, None):
        return None
    repetition, frequency, presence = numbers
    return PenaltyView(
        repetition=parameter_number(repetition),
        repetitions=rows[0],
        frequency=min(max(frequency, -LARGEST_NUMBER), LARGEST_NUMBER),
        frequencies=rows[1],
        presence=min(max(presence, -LARGEST_NUMBER), LARGEST_NUMBER),
        presences=rows[2],
        drafts=drafts,
        num_drafts=0 if drafts is None else drafts.shape[1],
    )


def edit_view(
    processing: ProcessingArguments, drafts: Tensor | None, batch: int, device: torch.device
) -> EditView | None:
    """Edits with their sums and marks unwritten; None where there are none. drafts: the tokens before the rows."""
    if not processing.active:
        return None
    penalties, values = penalty_view(processing, drafts), processing.bias_values
    tables = [(processing.bias_tokens, BIAS), (processing.end_tokens, END)]
    if penalties is not None:
        tables += [(processing.prompt_tokens, PROMPT), (processing.output_tokens, OUTPUT)]
    parts = [_keys(table, kind.value) for table, kind in tables if table is not None]
    width = sum(part.shape[1] for part in parts)
    padding = ENTRY_MULTIPLE - width % ENTRY_MULTIPLE  # so that no kernel is compiled for a width
    parts.append(torch.full((batch, padding), NO_KEY.value, dtype=torch.int32, device=device))
    keys, order = torch.cat(parts, 1).sort(dim=1, stable=True)
    entries = keys.shape[1]
    return EditView(
        keys=keys,
        order=order,
        bias_values=values,
        bias_width=any_size(0 if values is None else values.shape[1]),
        bias_sums=None if values is None else torch.empty(keys.shape, dtype=torch.float32, device=device),
        marks=torch.empty_like(keys),
        entries=entries,
        bisections=entries.bit_length(),
        penalties=penalties,
        PENALISED=tl.constexpr(penalties is not None),
        min_tokens=min(max(processing.min_tokens, 0), 2**31 - 1),
        min_tokens_rows=processing.min_tokens_rows,
        HOLDS_BACK=tl.constexpr(processing.end_tokens is not None),
    )


def _keys(table: Tensor, kind: int) -> Tensor:
    """int32 like a table of token ids; ids that cannot be tokens are padding."""
    known = (table >= 0) & (table <= LARGEST_TOKEN)
    return torch.where(known, table * KINDS.value + kind, NO_KEY.value).to(torch.int32)


@triton.jit
def first_entry(edits, request, key, used):
    """The first entry of a request whose key is not below `key`, int32 like key: `entries` where there is none."""
    entry = key * 0
    keys_ptr = edits.keys + request * edits.entries - 1
    stride = 1 << (edits.bisections - 1)
    for _ in range(edits.bisections):
        next_entry = entry + stride
        below = tl.load(keys_ptr + next_entry, mask=used & (next_entry <= edits.entries), other=NO_KEY) < key
        entry = tl.where(below, next_entry, entry)
        stride //= 2
    return entry


@triton.jit
def _row_above(edits, request, row):
    """The row that a tree's row, a scalar, is below; 0 or less where it is below none."""
    parent = tl.load(edits.parents + request * edits.num_drafts + row - 1)
    return tl.where(parent < row - 1, parent + 1, 0)


@triton.jit
def _depth(edits, request, row):
    """How many drafts are before a row: in a tree those on the way to it."""
    if edits.parents is None:
        return row
    else:
        depth = row * 0
        while row > 0:
            depth += 1
            row = _row_above(edits, request, row)
        return depth


@triton.jit
def _with_drafts_before(edits, request, step, tokens, marks):
    """Marks that count a token in the output also where it is among the drafts before a row."""
    penalties = edits.penalties
    if penalties.drafts is not None:
        drafts_ptr = penalties.drafts + request * penalties.num_drafts
        if edits.parents is not None:
            row = step
            while row > 0:
                marks += tl.where(tokens == tl.load(drafts_ptr + row - 1), ONCE, 0)
                row = _row_above(edits, request, row)
        else:
            for index in range(penalties.num_drafts):
                draft = tl.load(drafts_ptr + index)
                marks += tl.where((tokens == draft) & (step > index), ONCE, 0)
    return marks


@triton.jit
def penalties_of(penalties, request):
    """Repetition, frequency and presence penalty of a request, float32."""
    repetition = request_number(penalties.repetition, penalties.repetitions, 1, request)
    frequency = request_number(penalties.frequency, penalties.frequencies, 1, request)
    presence = request_number(penalties.presence, penalties.presences, 1, request)
    return repetition, frequency, presence


@triton.jit
def edits_are_valid(edits, request):
    """Whether a request's penalties are in range."""
    valid = request >= 0
    if edits.PENALISED:
        repetition, frequency, presence = penalties_of(edits.penalties, request)
        valid &= (repetition > 0) & (repetition < INFINITY)
        valid &= (frequency > -INFINITY) & (frequency < INFINITY)
        valid &= (presence > -INFINITY) & (presence < INFINITY)
    return valid


class TokenEdits(NamedTuple):
    """What is done to some tokens' logits in a row, whichever member's they are, in a kernel."""

    marks: Any  # int32: IN_PROMPT, ENDS of tokens that are excluded and, shifted, how often one is in the output
    biases: Any  # float32


@triton.jit
def listed_edits(edits, request, step, tokens, used):
    """`TokenEdits` of tokens of a row, as `Processing` says."""
    key = tokens.to(tl.int32) * KINDS
    entry = first_entry(edits, request, key, used)
    first = request * edits.entries
    listed = used & (entry < edits.entries)
    listed = listed & (tl.load(edits.keys + first + entry, mask=listed, other=NO_KEY) < key + KINDS)
    marks = tl.load(edits.marks + first + entry, mask=listed, other=0)
    biases = 0.0
    if edits.bias_sums is not None:
        biases = tl.load(edits.bias_sums + first + entry, mask=listed, other=0.0)
    if edits.PENALISED:
        marks = _with_drafts_before(edits, request, step, tokens, marks)
    if edits.HOLDS_BACK:
        held_back = edits.min_tokens
        if edits.min_tokens_rows is not None:
            held_back = tl.load(edits.min_tokens_rows + request)
        marks &= tl.where(_depth(edits, request, step) < held_back, -1, ~ENDS)
    return TokenEdits(marks, biases)


@triton.jit
def quotient(numerators, divisor):
    """Float32 numerators over a scalar, rounded as a division is, at one division for all of them.

    One step corrects the product with the reciprocal, which is off by less than 1.5 units in the last place.
    """
    rate = tl.div_rn(tl.full([], 1.0, tl.float32), divisor)
    product = numerators * rate
    corrected = tl.fma(tl.fma(-product, divisor, numerators), rate, product)
    return tl.where(tl.abs(product) < INFINITY, corrected, product)


@triton.jit
def processed(edits, request, token_edits, logits):
    """Logits as `Processing` says, but for what is excluded."""
    if edits.bias_sums is not None:
        logits = logits + token_edits.biases
    if edits.PENALISED:
        in_prompt = (token_edits.marks & IN_PROMPT) != 0
        output = token_edits.marks >> OUTPUT_SHIFT  # times
        repetition, frequency, presence = penalties_of(edits.penalties, request)
        repeated = tl.where(logits > 0, quotient(logits, repetition), logits * repetition)
        logits = tl.where(in_prompt | (output > 0), repeated, logits)
        logits = tl.where(output > 0, logits - (frequency * output.to(tl.float32) + presence), logits)
    return logits


@triton.jit
def allowed(mask, row, request, tokens, used):
    """Whether each token may be emitted at a row, by its place among a request's rows or among packed ones."""
    words_ptr = mask.words + request * mask.stride_batch + row * mask.stride_step
    word = tokens // 32
    words = tl.load(words_ptr + word, mask=used & (word < mask.count), other=0)
    return ((words >> (tokens % 32).to(tl.int32)) & 1) != 0
