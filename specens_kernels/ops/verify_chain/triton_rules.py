"""What the rules block and typical look at, on a GPU: shares of prefixes, masses of residuals, and entropies."""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from specens_kernels.ops.target_logprobs.triton_kernel import BLOCK_REGISTERS, BLOCK_WARPS
from specens_kernels.parts.chain import draft_odds, load_draft_tokens, request_is_valid
from specens_kernels.parts.draft import DraftView, chain_len, draft_temperature
from specens_kernels.parts.draw import block_probabilities, row_states
from specens_kernels.parts.launches import Launch, wait_for_launch_before
from specens_kernels.parts.rules import IN_SUMS, NO_SHARE, RuleView, load_mass, load_share
from specens_kernels.parts.statistics import NO_TOKEN, Statistics, tokens_of
from specens_kernels.parts.target import TargetView, target_temperature
from specens_kernels.parts.uniforms import RandomView

SHARES_WARPS = 4  # a draft at a time, whose row has fewer blocks than these have threads


@triton.jit
def shares_kernel(
    rule,  # RuleView, its shares written
    statistics,  # Statistics
    target,  # TargetView
    draft,  # DraftView
    random,  # RandomView
    DEPENDENT: tl.constexpr,
):
    wait_for_launch_before(DEPENDENT)
    request = tl.program_id(0).to(tl.int64)
    valid = request_is_valid(target, draft, random, rule, request, 1)
    greedy = target_temperature(target, request) == 0
    length = tl.where(valid & (greedy == 0), chain_len(draft, request), 0)
    soft_length = tl.where(draft_temperature(draft, request) == 0, 0, length)
    share = tl.zeros([1], tl.float64) + 1.0
    for index in range(0, draft.draft_len):
        step = tl.zeros([1], tl.int64) + index
        token = load_draft_tokens(draft, request, step, step < length)
        tested = (share >= 0) & (token >= 0) & (token < tl.maximum(target.vocab, draft.vocab))
        may_be_soft = tested & (step < soft_length)
        odds = draft_odds(statistics, target, draft, request, step, token, tested, may_be_soft)
        probability = tl.exp(odds.log_target)
        rest = tl.where((odds.target_status & NO_TOKEN) == 0, 1.0, 0.0) - probability
        mass = tl.where(odds.soft & (share > 0), IN_SUMS, share * tl.maximum(rest, 0.0))
        possible = tested & (share > 0) & (probability > 0)
        ratio = tl.exp(tl.where(possible, odds.log_target, 0.0) - tl.where(possible, odds.log_draft, 0.0))
        share = tl.where(tested, tl.where(possible, tl.minimum(share * ratio, 1.0), 0.0), NO_SHARE)
        position = rule.shares + request * 2 * draft.draft_len + step
        tl.store(position, share)
        tl.store(position + draft.draft_len, mass)


@triton.jit
def prefix_masses_kernel(
    rule,  # RuleView, its sums written
    statistics,  # Statistics
    target,  # TargetView
    draft,  # DraftView
    DEPENDENT: tl.constexpr,
):
    wait_for_launch_before(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    request = row // draft.draft_len
    step = row % draft.draft_len
    share = load_share(rule, draft, request, step - 1, step > 0)
    if (share < 0) | (load_share(rule, draft, request, step, step >= 0) < 0):
        return
    if load_mass(rule, draft, request, step, step >= 0) >= 0:
        return
    steps = tl.zeros([1], tl.int64) + step
    states = row_states(statistics, target, draft, request, steps, step >= 0)
    probabilities, draft_probabilities = block_probabilities(
        statistics, target, draft, states, request, step, tokens_of(statistics, block), step >= 0
    )
    mass = tl.sum(tl.maximum(probabilities * share.to(tl.float32) - draft_probabilities, 0.0), 0)
    tl.store(rule.sums + row * statistics.blocks + block, mass)


@triton.jit
def entropy_kernel(
    rule,  # RuleView, its sums written
    statistics,  # Statistics
    target,  # TargetView
    draft,  # DraftView
    DEPENDENT: tl.constexpr,
):
    wait_for_launch_before(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    request = row // draft.draft_len
    step = row % draft.draft_len
    if (step >= chain_len(draft, request)) | (target_temperature(target, request) == 0):
        return
    steps = tl.zeros([1], tl.int64) + step
    states = row_states(statistics, target, draft, request, steps, step < 0)
    probabilities, _ = block_probabilities(
        statistics, target, draft, states, request, step, tokens_of(statistics, block), step < 0
    )
    surprise = tl.sum(probabilities * tl.log(tl.where(probabilities > 0, probabilities, 1.0)), 0)
    tl.store(rule.sums + row * statistics.blocks + block, surprise)


def rule_launches(
    rule: RuleView, statistics: Statistics, target: TargetView, draft: DraftView, random: RandomView
) -> Iterator[Launch]:
    """What fills a rule's shares and sums."""
    arguments = {"rule": rule, "statistics": statistics, "target": target, "draft": draft}
    if rule.shares is not None:
        yield Launch(shares_kernel, rule.shares.shape[:1], arguments | {"random": random}, SHARES_WARPS)
    if rule.sums is not None:
        batch, draft_len, blocks = rule.sums.shape
        kernel, limit = (entropy_kernel, None) if rule.shares is None else (prefix_masses_kernel, BLOCK_REGISTERS)
        yield Launch(kernel, (batch * draft_len, blocks), arguments, BLOCK_WARPS, limit)
