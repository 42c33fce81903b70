"""What rules of a chain need beside the statistics: shares and masses of the block rule, entropies, decision trees."""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specens_kernels.arguments import Rule
from specens_kernels.decision_tree import NODE_FIELDS, longest_path
from specens_kernels.parts.draft import DraftView
from specens_kernels.parts.sampling import LARGEST_NUMBER
from specens_kernels.parts.statistics import Statistics
from specens_kernels.parts.uniforms import STREAM_ACCEPT, uniforms_at
from specens_kernels.rules import EMPTY_RESIDUAL_MASS, RuleKind

TOKEN = tl.constexpr(int(RuleKind.TOKEN))
BLOCK = tl.constexpr(int(RuleKind.BLOCK))
TYPICAL = tl.constexpr(int(RuleKind.TYPICAL))
SYNTHETIC = tl.constexpr(int(RuleKind.SYNTHETIC))
THRESHOLD = tl.constexpr(int(RuleKind.THRESHOLD))
DECISION_TREE = tl.constexpr(int(RuleKind.DECISION_TREE))
NODE_NUMBERS = tl.constexpr(NODE_FIELDS)
SMALLEST_RESIDUAL = tl.constexpr(EMPTY_RESIDUAL_MASS)
NO_SHARE = tl.constexpr(-1.0)  # the share after the end of a chain
IN_SUMS = tl.constexpr(-1.0)  # a mass that `sums` has
# What `tree_nodes` has copied to devices. Never freed, since a captured graph may read it.
KEPT_NODES: dict[tuple[tuple[float, ...], torch.device], Tensor] = {}


class RuleView(NamedTuple):
    """The rule of a chain and, for those that look at more than the draft tokens' probabilities, what they look at."""

    threshold: float  # of typical and threshold acceptance; a replacement's alpha
    alpha: float  # of typical acceptance; a replacement's beta
    shares: Tensor | None  # float64 [batch, 2, draft_len]: of each prefix, or NO_SHARE; the mass of a row, or IN_SUMS
    sums: Tensor | None  # float32 [batch, draft_len, blocks]: masses of rows, or their sums of probability * logarithm
    rates: tuple[float, ...] | None  # of synthetic acceptance, one a position, in float32
    rate_rests: tuple[float, ...] | None  # what float32 leaves of them
    nodes: Tensor | None  # float64 [nodes, NODE_NUMBERS], of a decision tree
    longest_path: int  # of the tree
    KIND: tl.constexpr
    SUBTRACTS: tl.constexpr  # a rejected draft is followed by a token from the residual, else by one from the target
    COMPARES: tl.constexpr  # weighs the draft against the most likely token, which takes its place


def tree_nodes(table: tuple[float, ...], device: torch.device) -> Tensor:
    """The nodes of a decision tree, float64 [nodes, NODE_NUMBERS]; the first call copies them to the device."""
    nodes = KEPT_NODES.get((table, device))
    if nodes is None:
        nodes = torch.tensor(table, dtype=torch.float64).reshape(-1, NODE_FIELDS).to(device)
        KEPT_NODES[table, device] = nodes
    return nodes


def new_rule(statistics: Statistics, draft: DraftView, rule: Rule, batch: int) -> RuleView:
    """A rule with what it needs unwritten."""
    shares = sums = None
    kind = RuleKind(rule.kind)
    if kind in (RuleKind.BLOCK, RuleKind.TYPICAL) and draft.tokens is not None:
        device = statistics.numbers.device
        if kind == RuleKind.BLOCK:
            shares = torch.empty(batch, 2, draft.draft_len, dtype=torch.float64, device=device)
        if kind == RuleKind.TYPICAL or statistics.DRAFT_PLANE.value >= 0:
            sums = torch.empty(batch, draft.draft_len, statistics.blocks, dtype=torch.float32, device=device)
    rates = rests = None
    if kind == RuleKind.SYNTHETIC and draft.draft_len > 0:
        rates = tuple(struct.unpack("f", struct.pack("f", rate))[0] for rate in rule.table)
        rests = tuple(exact - rate for exact, rate in zip(rule.table, rates, strict=True))
    nodes = tree_nodes(rule.table, statistics.numbers.device) if kind == RuleKind.DECISION_TREE else None
    return RuleView(
        threshold=rule.threshold,
        alpha=min(rule.alpha, LARGEST_NUMBER),
        shares=shares,
        sums=sums,
        rates=rates,
        rate_rests=rests,
        nodes=nodes,
        longest_path=0 if nodes is None else longest_path(rule.table),
        KIND=tl.constexpr(int(kind)),
        SUBTRACTS=tl.constexpr(kind.subtracts),
        COMPARES=tl.constexpr(kind.compares),
    )


@triton.jit
def load_share(rule, draft, request, step, used):
    """The share of the prefix whose last draft is that of `step`, float64 like step; NO_SHARE where `used` is false."""
    return tl.load(rule.shares + request * 2 * draft.draft_len + step, mask=used, other=NO_SHARE)


@triton.jit
def load_mass(rule, draft, request, step, used):
    """The mass that the residual of the prefix before `step` has, float64 like step, or IN_SUMS."""
    return tl.load(rule.shares + (request * 2 + 1) * draft.draft_len + step, mask=used, other=0.0)


@triton.jit
def load_sum(rule, statistics, draft, request, step, used):
    """The sum over the blocks of a row, float64 [steps]; step and used are [steps]."""
    block = tl.arange(0, statistics.BLOCK_COUNT)
    row_ptr = rule.sums + (request * draft.draft_len + step) * statistics.blocks
    mask = used[:, None] & (block < statistics.blocks)[None, :]
    return tl.sum(tl.load(row_ptr[:, None] + block[None, :], mask=mask, other=0.0).to(tl.float64), 1)


@triton.jit
def target_share(rule, draft, request, num_accepted):
    """What the target is multiplied with in the residual after the accepted tokens, float32."""
    share = tl.full([], 1.0, tl.float32)
    if rule.KIND == BLOCK:
        before = load_share(rule, draft, request, num_accepted - 1, num_accepted > 0).to(tl.float32)
        share = tl.where(num_accepted > 0, before, share)
    return share


@triton.jit
def block_accepted(rule, statistics, draft, random, request):
    """The longest prefix, int64, whose last uniform is below the chance that it is kept; 0 for greedy requests."""
    num_accepted = request * 0
    for length in range(1, draft.draft_len + 1):
        step = tl.zeros([1], tl.int64) + length
        share = load_share(rule, draft, request, step - 1, step > 0)
        within = share >= 0
        last = load_share(rule, draft, request, step, step < draft.draft_len) < 0
        mass = load_mass(rule, draft, request, step, within & (step < draft.draft_len))
        if statistics.DRAFT_PLANE >= 0:
            summed = within & ~last & (mass < 0)
            mass = tl.where(summed, load_sum(rule, statistics, draft, request, step, summed), mass)
        rest = mass + 1 - share
        chance = mass / tl.where(rest > SMALLEST_RESIDUAL, rest, 1.0)
        keeps = tl.where(last, share, tl.where(rest > SMALLEST_RESIDUAL, chance, 1.0))
        uniform = uniforms_at(random, draft, request, step - 1, step - 1, STREAM_ACCEPT, within)
        longer = tl.max((within & (uniform < keeps)).to(tl.int32), 0) > 0
        num_accepted = tl.where(longer, length, num_accepted)
    return num_accepted


@triton.jit
def typical_probability(rule, statistics, draft, request, step, used):
    """What the target probability of a draft must exceed, float64 [steps]."""
    surprise = load_sum(rule, statistics, draft, request, step, used)
    return tl.minimum(rule.alpha * tl.exp(surprise), tl.zeros_like(surprise) + rule.threshold)


@triton.jit
def rate_of(rule, step):
    """The rate at which synthetic acceptance accepts the draft of each step, float64 like step."""
    rate = tl.zeros(step.shape, tl.float32)
    rest = tl.zeros(step.shape, tl.float32)
    if rule.rates is not None:  # there are drafts
        for index in tl.static_range(len(rule.rates)):
            rate = tl.where(step == index, rule.rates[index], rate)
            rest = tl.where(step == index, rule.rate_rests[index], rest)
    return rate.to(tl.float64) + rest.to(tl.float64)


@triton.jit
def tree_replaces(rule, draft, assistant):
    """What the decision tree says of two probabilities, float64 [steps]."""
    node = rule.nodes + (draft * 0).to(tl.int64)
    for _ in range(rule.longest_path):
        value = tl.where(tl.load(node) == 1, assistant, draft)
        child = tl.where(value <= tl.load(node + 1), tl.load(node + 2), tl.load(node + 3))
        node = rule.nodes + child.to(tl.int64) * NODE_NUMBERS
    return tl.load(node + 4) > 0


@triton.jit
def replaces(rule, draft, assistant):
    """Whether the most likely token takes a draft's place.

    draft: the draft token's draft probability. assistant: the other token's target probability. float64 [steps].
    """
    if rule.KIND == DECISION_TREE:
        return tree_replaces(rule, draft, assistant)
    else:
        return (draft < rule.threshold) & (assistant > rule.alpha * draft)
