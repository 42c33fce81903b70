"""The acceptance rules of a tree, in float64: which node is the last accepted, and what the next token is drawn from.

A row has a share, the probability with which the text gets to it, and a distribution: the target's at first. Its
children are offered to it one after the other, each drawn from a draft distribution of its own, and what a rejected
child leaves is share * distribution - draft, where positive. Given that every child before was rejected, a child's
share is min(1, share * target / draft) at its token. Then the law of what is emitted from the row is the target's,
whatever the draft distributions are: they may depend on the siblings before (drawn without replacement), be all the
same (with replacement), belong to different drafters, or be one-hot (children that were chosen).

token: from the root down; a child is accepted or rejected for good when the text gets to it, so that the share of
    every row is 1. With replacement: Miao et al., SpecInfer, ASPLOS 2024 (multi-step speculative sampling). Without:
    Jeon et al., Recursive Speculative Decoding, 2024; Chen et al., Sequoia, NeurIPS 2024. For a chain: its rule token.
k_seq: from the root down as by token, but siblings that were drawn alike, with replacement from one distribution, are
    tested alike: each is accepted with probability min(1, target / (ratio * draft)) at its token, all against the same
    target, and when all were rejected target - ratio * draft is left, where positive. The ratio, from 1 to the number
    of them, is the one by which the law is the target's (`sequential_ratio`). Sun et al., SpecTr, NeurIPS 2023 (k-SEQ).
    A sibling without others that were drawn alike, as one that was chosen, is tested as by token.
traversal: from the leaves to the root; a row is accepted with what is left of its share when everything below it was
    rejected. Weng et al., Traversal Verification for Speculative Tree Decoding, NeurIPS 2025. For a chain: its rule
    block.
typical: the longest path all of whose nodes pass the test of a chain's rule typical. Cai et al., Medusa, ICML 2024; not
    lossless.
gumbel: the longest path whose every node is the token of the best score at the row of its parent; see
    `specens_kernels.ops.sample.gumbel`.
Greedy requests, under every rule: the longest path of most likely tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specens_kernels.arguments import Rule
from specens_kernels.ops.verify_chain.rules import at_tokens, entropy, typical_limit
from specens_kernels.ops.verify_tree.shape import Shape, rows_of_parents
from specens_kernels.rules import EMPTY_RESIDUAL_MASS, RuleKind

BISECTIONS = 60  # to the last bits of a ratio


class Drafts(NamedTuple):
    """Trees under test. Row i + 1 is the position after node i."""

    target: Tensor  # float64 [batch, rows, vocab]
    draft: Tensor  # float64 [batch, nodes, vocab], what a node was drawn from, given the siblings before it
    tokens: Tensor  # int64 [batch, nodes]
    drafters: Tensor  # int64 [batch, nodes], who drew a node; -1: it is one-hot
    random_numbers: Tensor  # float64 [batch, nodes]
    usable: Tensor  # bool [batch, nodes], whether there is a draft, and it is a token
    shape: Shape


class Offers(NamedTuple):
    """What comes of each child, if all siblings before it were rejected."""

    passes: Tensor  # bool [batch, nodes], accepted by its own uniform
    share: Tensor  # float64 [batch, rows], what is left of it after the children
    left: Tensor  # float64 [batch, rows, vocab], what the next token is drawn from after the children
    empty: Tensor  # bool [batch, nodes], nothing but rounding was left: the target is back in its place


class Runs(NamedTuple):
    """Siblings in a row that one drafter drew, each [batch, nodes]."""

    first: Tensor  # int64, of a node's run
    length: Tensor  # int64, how many they are
    is_last: Tensor  # bool


class Acceptance(NamedTuple):
    """The last accepted row, and what the next token is drawn from at each row."""

    last: Tensor  # int64 [batch]
    left: Tensor  # float64 [batch, rows, vocab]
    empty: Tensor  # bool [batch, nodes]
    subtracts: bool  # whether drafts and their distributions were looked at


def offer(drafts: Drafts, whole_paths: bool) -> Offers:
    """Offer every node to its row; whole_paths: a node inherits its row's share, else it is accepted on its own."""
    batch, rows, _ = drafts.target.shape
    request = torch.arange(batch, device=drafts.tokens.device)
    left, share = drafts.target.clone(), torch.ones_like(drafts.target[..., 0])
    passes, empty = torch.zeros_like(drafts.usable), torch.zeros_like(drafts.usable)
    for node in range(rows - 1):
        row, usable, draft = drafts.shape.parent_row[:, node], drafts.usable[:, node], drafts.draft[:, node]
        own_share, own_left = share[request, row], left[request, row]
        target_there = own_share * at_tokens(own_left[:, None], drafts.tokens[:, node, None])[:, 0]
        draft_there = at_tokens(draft[:, None], drafts.tokens[:, node, None])[:, 0]
        passes[:, node] = usable & (drafts.random_numbers[:, node] * draft_there < target_there)
        if whole_paths:
            share[:, node + 1] = torch.where(target_there > 0, target_there / draft_there, 0.0).clamp(max=1)

        residual = (own_share[:, None] * own_left - draft).clamp(min=0)
        mass = residual.sum(-1)
        rest = mass + 1 - own_share
        nothing = mass <= EMPTY_RESIDUAL_MASS
        lessened = torch.where(rest > EMPTY_RESIDUAL_MASS, mass / rest, 1.0)
        residual = torch.where(nothing[:, None], drafts.target[request, row], residual / mass[:, None])
        share[request, row] = torch.where(usable, lessened, own_share)
        left[request, row] = torch.where(usable[:, None], residual, own_left)
        empty[:, node] = usable & nothing & (residual.sum(-1) > 0)
    return Offers(passes, share, left, empty)


def offer_runs(drafts: Drafts) -> Offers:
    """Offer every run of siblings that were drawn alike to its row, by the rule k_seq."""
    _, count, is_last = runs(drafts)
    batch, rows, _ = drafts.target.shape
    request = torch.arange(batch, device=drafts.tokens.device)
    left = drafts.target.clone()
    passes, empty = torch.zeros_like(drafts.usable), torch.zeros_like(drafts.usable)
    for node in range(rows - 1):
        row, usable = drafts.shape.parent_row[:, node], drafts.usable[:, node]
        own_left, draft, token = left[request, row], drafts.draft[:, node], drafts.tokens[:, node, None]
        draft = draft * sequential_ratio(own_left, draft, count[:, node])[:, None]
        target_there, draft_there = (at_tokens(values[:, None], token)[:, 0] for values in (own_left, draft))
        passes[:, node] = usable & (drafts.random_numbers[:, node] * draft_there < target_there)

        residual = (own_left - draft).clamp(min=0)
        mass = residual.sum(-1)
        nothing = mass <= EMPTY_RESIDUAL_MASS
        residual = torch.where(nothing[:, None], drafts.target[request, row], residual / mass[:, None])
        ends = usable & is_last[:, node]
        left[request, row] = torch.where(ends[:, None], residual, own_left)
        empty[:, node] = ends & nothing & (residual.sum(-1) > 0)
    return Offers(passes, torch.ones_like(left[..., 0]), left, empty)


def runs(drafts: Drafts) -> Runs:
    """Those of each node that is usable; a node that was not drawn is alone in one."""
    batch, nodes = drafts.tokens.shape
    request, node = torch.arange(batch, device=drafts.tokens.device), torch.arange(nodes, device=drafts.tokens.device)
    first = node.expand(batch, -1).clone()  # of the run
    newest = torch.full((batch, nodes + 1), -1, dtype=torch.int64, device=node.device)  # run of each row
    for own in range(nodes):
        row, usable, drafter = drafts.shape.parent_row[:, own], drafts.usable[:, own], drafts.drafters[:, own]
        run = newest[request, row]
        goes_on = usable & (run >= 0) & (drafter >= 0) & (drafters_at(drafts, run) == drafter)
        first[:, own] = torch.where(goes_on, run, own)
        newest[request, row] = torch.where(usable, first[:, own], run)
    together = (first[:, :, None] == first[:, None]) & drafts.usable[:, None]
    return Runs(first, together.sum(2), ~(together & (node > node[:, None])).any(2))


def drafters_at(drafts: Drafts, nodes: Tensor) -> Tensor:
    """Who drew a node of each request [batch]."""
    return drafts.drafters.gather(1, nodes.clamp(min=0)[:, None])[:, 0]


def sequential_ratio(target: Tensor, draft: Tensor, count: Tensor) -> Tensor:
    """The ratio by which `count` drafts of one distribution are tested, float64 [batch].

    With overlap = sum min(draft, target / ratio), one of them is accepted with probability 1 - (1 - overlap)^count, and
    what is accepted is distributed as min(draft, target / ratio). So the target is never exceeded where that is at most
    ratio * overlap; the least such ratio, where they are equal, accepts most. Found by bisection, of the two numbers'
    differences to 1, which are told apart where nearly all drafts are accepted: left = 1 - ratio * overlap is a sum.
    """
    count = count.clamp(min=1).to(target.dtype)
    low, high = torch.ones_like(count), count.clone()
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        left = (target - middle[:, None] * draft).clamp(min=0).sum(-1)
        enough = suffices(left, middle, count)
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    return high


def suffices(left: Tensor, ratio: Tensor, count: Tensor) -> Tensor:
    """Whether what is left of the target at a ratio is no more than the chance that all tests fail."""
    return left <= (1 - (1 - left) / ratio).clamp(min=0) ** count


def first_passing(passes: Tensor, shape: Shape) -> Tensor:
    """int64 [batch]: the row that one comes to from the root, always to the first child that passes."""
    here = torch.zeros_like(shape.depth[:, 0])
    for node in range(passes.shape[1]):
        here = torch.where(passes[:, node] & (shape.parent_row[:, node] == here), node + 1, here)
    return here


def first_kept(share: Tensor, drafts: Drafts) -> Tensor:
    """int64 [batch]: the first row whose uniform is below its share, children before parents, the root at last."""
    batch, nodes = drafts.tokens.shape
    request = torch.arange(batch, device=share.device)
    found = torch.full((batch, nodes + 1), -1, dtype=torch.int64, device=share.device)  # in the tree below a row
    for node in reversed(range(nodes)):
        row = drafts.shape.parent_row[:, node]
        own = torch.where(drafts.random_numbers[:, node] < share[:, node + 1], node + 1, -1)
        own = torch.where(found[:, node + 1] >= 0, found[:, node + 1], own)
        found[request, row] = torch.where(drafts.usable[:, node] & (own >= 0), own, found[request, row])
    return found[:, 0].clamp(min=0)


def longest(passes: Tensor, shape: Shape) -> Tensor:
    """int64 [batch]: the deepest row to which all nodes pass, the first of several."""
    rows = torch.arange(passes.shape[1] + 1, device=passes.device)
    whole = ~(shape.above & ~passes[:, None]).any(2)
    whole = whole & torch.nn.functional.pad(shape.used, (1, 0), value=True)
    return torch.where(whole, shape.depth * len(rows) + (len(rows) - 1 - rows), -1).argmax(1)


def typical(drafts: Drafts, rule: Rule) -> Tensor:
    """bool [batch, nodes]: whether the target probability exceeds what the rule typical of a chain asks for."""
    limit = rows_of_parents(typical_limit(entropy(drafts.target), rule), drafts.shape)
    return drafts.usable & (at_tokens(rows_of_parents(drafts.target, drafts.shape), drafts.tokens) > limit)


def apply_rule(rule: Rule, drafts: Drafts, greedy: Tensor) -> Acceptance:
    """Judge trees; greedy: bool [batch]. Targets of greedy requests are one-hot, under the rule gumbel all are."""
    target_there = at_tokens(rows_of_parents(drafts.target, drafts.shape), drafts.tokens)
    most_likely = longest(drafts.usable & (target_there > 0), drafts.shape)
    if rule.kind == RuleKind.GUMBEL:
        return Acceptance(most_likely, drafts.target, torch.zeros_like(drafts.usable), False)
    if rule.kind == RuleKind.TYPICAL:
        last = longest(typical(drafts, rule), drafts.shape)
        empty = torch.zeros_like(drafts.usable)
        return Acceptance(torch.where(greedy, most_likely, last), drafts.target, empty, False)
    offers = offer_runs(drafts) if rule.kind == RuleKind.K_SEQ else offer(drafts, rule.kind == RuleKind.TRAVERSAL)
    if rule.kind == RuleKind.TRAVERSAL:
        last = first_kept(offers.share, drafts)
    else:
        last = first_passing(offers.passes, drafts.shape)
    left = torch.where(greedy[:, None, None], drafts.target, offers.left)
    return Acceptance(torch.where(greedy, most_likely, last), left, offers.empty & ~greedy[:, None], True)
