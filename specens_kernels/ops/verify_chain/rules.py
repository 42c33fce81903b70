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


def typical_limit(target: Tensor, rule: Rule) -> Tensor:
    """What the probability of a typical token exceeds, at each row of target [..., vocab]."""
    entropy = -torch.where(target > 0, target * target.log(), 0.0).sum(-1)
    return torch.clamp(rule.alpha * (-entropy).exp(), max=rule.threshold)


def leading(accepted: Tensor, chain: Chain) -> Tensor:
    """The number of accepted drafts before the first that is not."""
    index = torch.arange(accepted.shape[1], device=accepted.device)
    return (accepted & (index < chain.chain_end[:, None])).int().cumprod(1).sum(1)


def whole(chain: Chain) -> Tensor:
    """A share of 1 for each request, float64 [batch]."""
    return torch.ones_like(chain.chain_end, dtype=torch.float64)


def token_rule(chain: Chain, _rule: Rule) -> Acceptance:
    """Accept while uniform * draft < target, strictly: a token of target probability 0 is never accepted."""
    accepted = chain.random_numbers * at_tokens(chain.draft, chain.tokens) < at_tokens(chain.target, chain.tokens)
    return Acceptance(leading(accepted, chain), whole(chain))


def block_rule(chain: Chain, _rule: Rule) -> Acceptance:
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


def typical_rule(chain: Chain, rule: Rule) -> Acceptance:
    """Accept while the target probability exceeds min(threshold, alpha * exp(-entropy of the target))."""
    target = chain.target[:, : chain.tokens.shape[1]]
    return Acceptance(leading(at_tokens(target, chain.tokens) > typical_limit(target, rule), chain), whole(chain))


def threshold_rule(chain: Chain, rule: Rule) -> Acceptance:
    """Accept while the target probability is at least the threshold."""
    return Acceptance(leading(at_tokens(chain.target, chain.tokens) >= rule.threshold, chain), whole(chain))


def synthetic_rule(chain: Chain, rule: Rule) -> Acceptance:
    """Accept while the uniform number is below the position's rate, whatever the draft is."""
    rate = torch.tensor(rule.table, dtype=torch.float64, device=chain.random_numbers.device)
    return Acceptance(leading(chain.random_numbers < rate, chain), whole(chain))


def walk_tree(table: tuple[float, ...], draft: Tensor, assistant: Tensor) -> Tensor:
    """bool like draft: what a decision tree says of the two probabilities. table: see `DecisionTree.table`."""
    nodes = torch.tensor(table, dtype=torch.float64, device=draft.device).reshape(-1, NODE_FIELDS)
    index = torch.zeros_like(draft, dtype=torch.int64)
    for _ in range(longest_path(table)):
        feature, threshold, left, right, _ = nodes[index].unbind(-1)
        index = torch.where(torch.where(feature == 1, assistant, draft) <= threshold, left, right).long()
    return nodes[index][..., -1] > 0


def comparing_rule(chain: Chain, replaces: Callable[[Tensor, Tensor], Tensor]) -> Acceptance:
    """Accept while the draft token is the target's most likely one, or is not replaced by it.

    replaces(draft, assistant): of the draft token's draft probability and the most likely token's target probability.
    """
    own = chain.picked[:, : chain.tokens.shape[1]]
    replaced = replaces(at_tokens(chain.draft, chain.tokens), at_tokens(chain.target, own))
    possible = at_tokens(chain.target, chain.tokens) > 0
    return Acceptance(leading(possible & ((chain.tokens == own) | ~replaced), chain), whole(chain))


def replacement_rule(chain: Chain, rule: Rule) -> Acceptance:
    """Replace what has a draft probability below alpha, by what has a target probability above beta times that."""
    alpha, beta = rule.threshold, rule.alpha
    return comparing_rule(chain, lambda draft, assistant: (draft < alpha) & (assistant > beta * draft))


def decision_tree_rule(chain: Chain, rule: Rule) -> Acceptance:
    """Replace what the tree says."""
    return comparing_rule(chain, lambda draft, assistant: walk_tree(rule.table, draft, assistant))


def gumbel_rule(chain: Chain, _rule: Rule) -> Acceptance:
    """Accept while the draft token is the one of the best score."""
    return Acceptance(leading(chain.tokens == chain.picked[:, : chain.tokens.shape[1]], chain), whole(chain))


RULES: dict[RuleKind, Callable[[Chain, Rule], Acceptance]] = {
    RuleKind.TOKEN: token_rule,
    RuleKind.BLOCK: block_rule,
    RuleKind.TYPICAL: typical_rule,
    RuleKind.SYNTHETIC: synthetic_rule,
    RuleKind.THRESHOLD: threshold_rule,
    RuleKind.REPLACEMENT: replacement_rule,
    RuleKind.DECISION_TREE: decision_tree_rule,
    RuleKind.GUMBEL: gumbel_rule,
}
