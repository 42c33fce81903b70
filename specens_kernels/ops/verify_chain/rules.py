"""The acceptance rules of a chain, in float64: how many drafts are accepted, and what the next token is drawn from.

token: Leviathan et al., Fast Inference from Transformers via Speculative Decoding, ICML 2023; Chen et al., Accelerating
    Large Language Model Decoding with Speculative Sampling, 2023; for ensembles Fu et al., ICML 2025.
block: Sun et al., Block Verification Accelerates Speculative Decoding, ICLR 2025.
typical: Cai et al., Medusa, ICML 2024; not lossless.
threshold: a simpler typical; not lossless.
synthetic: accepts at given rates, to plan capacity; not lossless.
replacement, decision tree: Wang et al., Speculate, then Collaborate: Fusing Knowledge of Language Models during
    Decoding, ICML 2025; the text of two models, neither's own.
gumbel: Daliri, Musco, Suresh, Coupling without Communication and Drafter-Invariant Speculative Decoding, 2024; the
    scores are in `specens_kernels.ops.sample.gumbel`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from specens_kernels.arguments import Rule
from specens_kernels.decision_tree import NODE_FIELDS, longest_path
from specens_kernels.ops.target_logprobs.reference import constants
from specens_kernels.rules import EMPTY_RESIDUAL_MASS, RuleKind


class Chain(NamedTuple):
    """Drafts under test. Row j is the position of draft j; rows after chain_end are not looked at."""

    target: Tensor  # float64 [batch, rows, vocab]
    draft: Tensor  # float64 [batch, draft_len, vocab]
    tokens: Tensor  # int64 [batch, draft_len]
    random_numbers: Tensor  # float64 [batch, draft_len]
    chain_end: Tensor  # int64 [batch]
    picked: Tensor  # int64 [batch, rows]: the most likely token of the target, or the one of the best score


class Acceptance(NamedTuple):
    """num_accepted drafts; the residual after a rejection, where the rule subtracts: target_share * target - draft."""

    num_accepted: Tensor  # int64 [batch]
    target_share: Tensor  # float64 [batch]


def at_tokens(probs: Tensor, tokens: Tensor) -> Tensor:
    """[batch, drafts]: the probabilities [batch, drafts or more, vocab] of draft tokens, 0 outside the vocabulary."""
    known = (tokens >= 0) & (tokens < probs.shape[-1])
    picked = probs[:, : tokens.shape[1]].gather(2, torch.where(known, tokens, 0)[..., None])[..., 0]
    return torch.where(known, picked, 0.0)


def entropy(probs: Tensor) -> Tensor:
    """Of each row of probs [..., vocab]; of a part of the vocabulary that part's share of it."""
    return -torch.where(probs > 0, probs * probs.log(), 0.0).sum(-1)


def typical_limit(entropies: Tensor, rule: Rule) -> Tensor:
    """What the probability of a typical token exceeds, at rows of the target with these entropies."""
    return torch.clamp(rule.alpha * (-entropies).exp(), max=rule.threshold)


def leading(accepted: Tensor, chain_end: Tensor) -> Tensor:
    """The number of accepted drafts before the first that is not, int64 [batch]."""
    index = torch.arange(accepted.shape[1], device=accepted.device)
    return (accepted & (index < chain_end[:, None])).int().cumprod(1).sum(1)


def whole(chain: Chain) -> Tensor:
    """A share of 1 for each request, float64 [batch]."""
    return torch.ones_like(chain.chain_end, dtype=torch.float64)


def block_rule(chain: Chain) -> Acceptance:
    """Accept the longest prefix whose last uniform is below the chance that its block, as a whole, is kept."""
    target, draft = at_tokens(chain.target, chain.tokens), at_tokens(chain.draft, chain.tokens)
    ratio = torch.where(target > 0, target / draft, 0.0)  # infinite where the draft could not be drawn
    share = whole(chain)
    num_accepted, accepted_share = torch.zeros_like(chain.chain_end), share
    for length in range(1, target.shape[1] + 1):
        share = torch.where(share > 0, share * ratio[:, length - 1], 0.0).clamp(max=1)
        last = chain.chain_end == length
        keeps = share
        if length < target.shape[1]:
            mass = (share[:, None] * chain.target[:, length] - chain.draft[:, length]).clamp(min=0).sum(-1)
            rest = mass + 1 - share
            keeps = torch.where(last, share, torch.where(rest > EMPTY_RESIDUAL_MASS, mass / rest, 1.0))
        longer = (chain.random_numbers[:, length - 1] < keeps) & (length <= chain.chain_end)
        num_accepted = torch.where(longer, length, num_accepted)
        accepted_share = torch.where(longer, share, accepted_share)
    return Acceptance(num_accepted, accepted_share)


class Tested(NamedTuple):
    """What a rule that judges each draft by itself looks at, [batch, draft_len]."""

    target: Tensor  # float64, the target probability of each draft
    draft: Tensor  # float64, the probability that it was drawn with
    random_numbers: Tensor  # float64
    is_picked: Tensor  # bool, it is the token that the row picks
    picked: Tensor  # float64, the target probability of that
    limit: Tensor | None  # float64, what a typical token exceeds; None: not looked at


def tested(chain: Chain, rule: Rule) -> Tested:
    """Of whole rows."""
    rows, own = chain.target[:, : chain.tokens.shape[1]], chain.picked[:, : chain.tokens.shape[1]]
    limit = typical_limit(entropy(rows), rule) if rule.kind == RuleKind.TYPICAL else None
    at_target, at_draft = at_tokens(rows, chain.tokens), at_tokens(chain.draft, chain.tokens)
    return Tested(at_target, at_draft, chain.random_numbers, chain.tokens == own, at_tokens(rows, own), limit)


def token_test(drafts: Tested, _rule: Rule) -> Tensor:
    """Accept while uniform * draft < target, strictly: a token of target probability 0 is never accepted."""
    return drafts.random_numbers * drafts.draft < drafts.target


def typical_test(drafts: Tested, _rule: Rule) -> Tensor:
    """Accept while the target probability exceeds min(threshold, alpha * exp(-entropy of the target))."""
    assert drafts.limit is not None
    return drafts.target > drafts.limit


def threshold_test(drafts: Tested, rule: Rule) -> Tensor:
    """Accept while the target probability is at least the threshold."""
    return drafts.target >= rule.threshold


def synthetic_test(drafts: Tested, rule: Rule) -> Tensor:
    """Accept while the uniform number is below the position's rate, whatever the draft is."""
    return drafts.random_numbers < constants(rule.table, drafts.target.device)


def walk_tree(table: tuple[float, ...], draft: Tensor, assistant: Tensor) -> Tensor:
    """bool like draft: what a decision tree says of the two probabilities. table: see `DecisionTree.table`."""
    nodes = constants(table, draft.device).reshape(-1, NODE_FIELDS)
    index = torch.zeros_like(draft, dtype=torch.int64)
    for _ in range(longest_path(table)):
        feature, threshold, left, right, _ = nodes[index].unbind(-1)
        index = torch.where(torch.where(feature == 1, assistant, draft) <= threshold, left, right).long()
    return nodes[index][..., -1] > 0


def comparing_test(drafts: Tested, replaced: Tensor) -> Tensor:
    """Accept while the draft token is the target's most likely one, or is not replaced by it."""
    return (drafts.target > 0) & (drafts.is_picked | ~replaced)


def replacement_test(drafts: Tested, rule: Rule) -> Tensor:
    """Replace what has a draft probability below alpha, by what has a target probability above beta times that."""
    alpha, beta = rule.threshold, rule.alpha
    return comparing_test(drafts, (drafts.draft < alpha) & (drafts.picked > beta * drafts.draft))


def decision_tree_test(drafts: Tested, rule: Rule) -> Tensor:
    """Replace what the tree says."""
    return comparing_test(drafts, walk_tree(rule.table, drafts.draft, drafts.picked))


def gumbel_test(drafts: Tested, _rule: Rule) -> Tensor:
    """Accept while the draft token is the one of the best score."""
    return drafts.is_picked


TESTS: dict[RuleKind, Callable[[Tested, Rule], Tensor]] = {
    RuleKind.TOKEN: token_test,
    RuleKind.TYPICAL: typical_test,
    RuleKind.SYNTHETIC: synthetic_test,
    RuleKind.THRESHOLD: threshold_test,
    RuleKind.REPLACEMENT: replacement_test,
    RuleKind.DECISION_TREE: decision_tree_test,
    RuleKind.GUMBEL: gumbel_test,
}


def apply_rule(chain: Chain, rule: Rule) -> Acceptance:
    """How many drafts a rule accepts."""
    if rule.kind == RuleKind.BLOCK:
        return block_rule(chain)
    return Acceptance(leading(TESTS[RuleKind(rule.kind)](tested(chain, rule), rule), chain.chain_end), whole(chain))
