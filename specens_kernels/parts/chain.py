"""The acceptance test of a request's draft tokens, from the statistics of its rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from specens_kernels.parts.draft import (
    chain_len,
    draft_index,
    draft_temperature,
    drafter_logits,
    drafter_of,
    drafts_are_valid,
    raw_draft_logits,
    row_count,
)
from specens_kernels.parts.rules import (
    BLOCK,
    SYNTHETIC,
    THRESHOLD,
    TYPICAL,
    block_accepted,
    rate_of,
    replaces,
    typical_probability,
)
from specens_kernels.parts.sampling import INFINITY, filters_are_valid
from specens_kernels.parts.states import draft_state, log_power, log_probability, target_state
from specens_kernels.parts.statistics import NO_SLOT, NO_TOKEN, NOWHERE, row_marks, top_tokens
from specens_kernels.parts.target import clean, everywhere, raw_logits, target_is_valid, target_temperature
from specens_kernels.parts.uniforms import STREAM_ACCEPT, uniforms_at
from specens_kernels.results import Status

INVALID_DRAFT_TOKEN = tl.constexpr(int(Status.INVALID_DRAFT_TOKEN))
INVALID_PARAMETER = tl.constexpr(int(Status.INVALID_PARAMETER))

# how the next token comes about
NOTHING = tl.constexpr(0)
FROM_TARGET = tl.constexpr(1)
MOST_LIKELY = tl.constexpr(2)
FROM_TARGET_WITHOUT_DRAFT = tl.constexpr(3)  # the residual of a one-hot draft
FROM_RESIDUAL = tl.constexpr(4)


class Outcome(NamedTuple):
    """What is written; the fields of a Verdict, and how the next token comes about."""

    tokens: Tensor  # int64 [batch, draft_len + 1]
    num_accepted: Tensor  # int64 [batch]
    num_tokens: Tensor  # int64 [batch]
    next_token: Tensor  # int64 [batch]
    logprobs: Tensor | None  # float32 [batch, draft_len + 1]
    status: Tensor  # int32 [batch]
    kinds: Tensor | None  # int32 [batch], where the next token is drawn in a later launch
    states: Tensor | None  # float32 [batch, STATE_NUMBERS], likewise: what makes probabilities in its row
    STATE_NUMBERS: tl.constexpr


class Odds(NamedTuple):
    """What decides about drafts, in a kernel."""

    log_target: Any  # of their probabilities under the target, float64 [steps]
    log_draft: Any  # and under the draft distribution; 0 where the draft is one-hot
    soft: Any  # bool [steps]: whether there is a draft distribution
    target_status: Any  # bits of the target's row, int32 [steps]
    draft_status: Any  # and of the draft's


@triton.jit
def request_is_valid(target, draft, random, rule, request, BLOCK_STEPS: tl.constexpr):
    """Whether a request's sampling parameters, weights, length and uniforms are in range."""
    length = chain_len(draft, request)
    valid = target_is_valid(target, request) & drafts_are_valid(draft, request)
    if draft.FILTERED:
        valid &= filters_are_valid(draft.filters, request)
    if random.uniforms is not None:
        bad = tl.zeros([BLOCK_STEPS], tl.int32)
        for first in range(0, draft.draft_len + 1, BLOCK_STEPS):
            index = first + tl.arange(0, BLOCK_STEPS)
            used = ((index < length) & (index < draft.draft_len)) | (index == draft.draft_len)
            if rule.KIND == SYNTHETIC:
                used &= everywhere(target_temperature(target, request) != 0, index) | (index < draft.draft_len)
            values = tl.load(random.uniforms + request * (draft.draft_len + 1) + index, mask=used, other=0.0)
            bad |= tl.where((values >= 0) & (values < 1), 0, 1)
        if rule.KIND == SYNTHETIC:
            valid &= tl.max(bad, 0) == 0
        else:
            valid &= (target_temperature(target, request) == 0) | (tl.max(bad, 0) == 0)
    return valid


@triton.jit
def load_draft_tokens(draft, request, step, used):
    """int64 like step, -1 where `used` is false."""
    index = draft_index(draft, request, step)
    token_ptr = draft.tokens + request * draft.tokens_stride_batch + index * draft.tokens_stride_step
    return tl.load(token_ptr, mask=used, other=-1).to(tl.int64)


@triton.jit
def draft_log_probability(statistics, target, draft, state, drafter, request, step, tokens, used):
    """Log of the draft distribution's probability of each token, float64; drafter: a member, unless from outside."""
    logits = drafted_logits(target, draft, drafter, request, step, tokens, used)
    if statistics.DRAFT_SLOT != NO_SLOT:
        logits = tl.where(logits >= state.cut, logits, -INFINITY)
    return log_power(logits, state.maximum, state.offset, draft_temperature(draft, request), tl.float64)


@triton.jit
def drafted_logits(target, draft, drafter, request, step, tokens, used):
    """The clean logits of each token that drafts were drawn by, float32."""
    logits = tl.zeros(tokens.shape, tl.float32) - INFINITY
    if draft.logits is not None:
        logits = clean(raw_draft_logits(target, draft, request, step, tokens, used))
    else:
        for member in tl.static_range(len(target.logits)):
            drafts = used & (drafter == member)
            own = raw_logits(target, member, request, step, tokens, drafts)
            own = drafter_logits(target, draft, member, request, step, tokens, drafts, own)
            logits = tl.where(drafter == member, clean(own), logits)
    return logits


@triton.jit
def draft_odds(statistics, target, draft, request, step, token, tested, may_be_soft):
    """The Odds of draft tokens. may_be_soft: where a draft distribution is looked for."""
    rows = request * target.steps + step
    state, row_status = target_state(statistics, target, request, rows, tested)
    marks, draft_marks = row_marks(statistics, rows, tested)
    log_target = log_probability(statistics, target, state, request, step, token, tested, tl.float64)
    log_draft = tl.zeros(step.shape, tl.float64)
    soft = tested & (step < 0)
    draft_status = draft_marks & 0
    if statistics.DRAFT_PLANE >= 0:
        drafts = draft_state(statistics, draft, request, step, rows, draft_marks, may_be_soft)
        soft = drafts.soft
        draft_status = drafts.status
        drafter = tl.zeros_like(step)
        if draft.logits is None:
            drafter = drafter_of(draft, request, step, soft)
        log_own = draft_log_probability(statistics, target, draft, drafts.state, drafter, request, step, token, soft)
        log_draft = tl.where(soft, log_own, log_draft)
    return Odds(log_target, log_draft, soft, row_status | marks, draft_status)


@triton.jit
def stands(rule, statistics, target, request, step, token, odds, tested):
    """Whether a draft is not replaced by the most likely token of its row; odds: of the draft."""
    rows = request * target.steps + step
    other = top_tokens(statistics, rows, tested)
    known = tested & (other != NOWHERE)
    state, _ = target_state(statistics, target, request, rows, known)
    log_other = log_probability(statistics, target, state, request, step, other, known, tl.float64)
    gives_way = (token != other) & replaces(rule, tl.exp(odds.log_draft), tl.exp(log_other))
    return known & (tl.exp(odds.log_target) > 0) & (gives_way == 0)


@triton.jit
def test_drafts(outcome, statistics, target, draft, random, rule, request, valid, BLOCK_STEPS: tl.constexpr):
    """Accept a prefix of the chain, and emit it.

    Returns the number of accepted tokens, the number of tokens before the first one that is no token, and status bits.
    """
    greedy = target_temperature(target, request) == 0
    length = tl.where(valid, chain_len(draft, request), 0)
    soft_length = tl.where(greedy | (draft_temperature(draft, request) == 0), 0, length)
    num_accepted = length
    chain_end = length
    status = 0
    if rule.KIND == BLOCK:
        accepted_block = block_accepted(rule, statistics, draft, random, request)
    for first in range(0, draft.draft_len, BLOCK_STEPS):
        step = first + tl.arange(0, BLOCK_STEPS).to(tl.int64)
        reached = tl.where(num_accepted >= first, length, 0)
        token = load_draft_tokens(draft, request, step, step < reached)
        tested = (step < reached) & (token >= 0) & (token < tl.maximum(target.vocab, draft.vocab))
        may_be_soft = tested & (step < soft_length)
        odds = draft_odds(statistics, target, draft, request, step, token, tested, may_be_soft)
        if rule.KIND == BLOCK:
            accepted = step < accepted_block
        elif rule.KIND == TYPICAL:
            accepted = tl.exp(odds.log_target) > typical_probability(rule, statistics, draft, request, step, tested)
        elif rule.KIND == THRESHOLD:
            accepted = tl.exp(odds.log_target) >= rule.threshold
        elif rule.COMPARES:
            accepted = stands(rule, statistics, target, request, step, token, odds, tested)
        elif rule.KIND == SYNTHETIC:
            uniforms_here = uniforms_at(random, draft, request, step, step, STREAM_ACCEPT, tested)
            accepted = uniforms_here < rate_of(rule, step)
        else:
            uniforms_here = uniforms_at(random, draft, request, step, step, STREAM_ACCEPT, tested)
            accepted = uniforms_here * tl.exp(odds.log_draft) < tl.exp(odds.log_target)
        if statistics.TOP_PLANE >= 0 and rule.KIND != SYNTHETIC and not rule.COMPARES:
            accepted = tl.where(
                greedy, token == top_tokens(statistics, request * target.steps + step, tested), accepted
            )
        num_accepted = tl.minimum(num_accepted, tl.min(tl.where(accepted & tested, length, step), 0))
        chain_end = tl.minimum(chain_end, tl.min(tl.where(tested, length, step), 0))
        bits = tl.where(step < num_accepted, odds.target_status, 0)
        if rule.SUBTRACTS or rule.COMPARES:  # else no draft distribution is looked at
            bits |= tl.where(tested & (step <= num_accepted), odds.draft_status, 0)
        status |= tl.reduce_or(bits, 0)
        emit(outcome, draft, request, step, tl.where(step < num_accepted, token, -1), odds.log_target, num_accepted)
    return num_accepted, chain_end, status


@triton.jit
def emit(outcome, draft, request, step, token, log_probability, num_accepted):
    """Write the columns of the tested drafts, but for that of the next token."""
    own = (step < draft.draft_len) & (step != num_accepted)
    column = request * (draft.draft_len + 1) + step
    tl.store(outcome.tokens + column, token, mask=own)
    if outcome.logprobs is not None:
        logprob = tl.where(token >= 0, log_probability, 0.0)
        tl.store(outcome.logprobs + column, logprob.to(tl.float32), mask=own)


@triton.jit
def walk(outcome, statistics, target, draft, random, rule, request, BLOCK_STEPS: tl.constexpr):
    """The number of accepted tokens, int64, how the next token comes about, and the status, int32, of a request."""
    valid = request_is_valid(target, draft, random, rule, request, BLOCK_STEPS)
    length = tl.where(valid, chain_len(draft, request), 0)
    num_accepted = length
    chain_end = length
    status = 0
    if draft.tokens is not None:
        num_accepted, chain_end, status = test_drafts(
            outcome, statistics, target, draft, random, rule, request, valid, BLOCK_STEPS
        )
    rejected = num_accepted < chain_end
    has_row = valid & (num_accepted < row_count(target, draft, request, length))
    step = tl.zeros([1], tl.int64) + num_accepted
    rows = request * target.steps + step
    used = everywhere(has_row, step)
    _, row_status = target_state(statistics, target, request, rows, used)
    marks, draft_marks = row_marks(statistics, rows, used)
    status |= tl.max(tl.where(used, row_status | marks, 0), 0)
    status |= tl.where((num_accepted == chain_end) & (chain_end < length), INVALID_DRAFT_TOKEN, 0)
    kind = tl.where(rejected & rule.SUBTRACTS, FROM_TARGET_WITHOUT_DRAFT, FROM_TARGET)
    if statistics.DRAFT_PLANE >= 0 and rule.SUBTRACTS:
        tested = everywhere(has_row & rejected & (draft_temperature(draft, request) > 0), step)
        soft = draft_state(statistics, draft, request, step, rows, draft_marks, tested).soft
        kind = tl.where(tl.max(soft.to(tl.int32), 0) > 0, FROM_RESIDUAL, kind)
    if rule.COMPARES:
        kind = tl.where(has_row, MOST_LIKELY, kind)
    else:
        kind = tl.where(target_temperature(target, request) == 0, MOST_LIKELY, kind)
    if rule.KIND == SYNTHETIC:  # which accepts drafts of rows without any token, too
        kind = tl.where(has_row & ((tl.max(tl.where(used, row_status, 0), 0) & NO_TOKEN) == 0), kind, NOTHING)
    else:
        kind = tl.where(has_row & ((status & NO_TOKEN) == 0), kind, NOTHING)
    return num_accepted, kind, tl.where(valid, status, INVALID_PARAMETER)
