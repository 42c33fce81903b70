"""The operations in plain PyTorch, as lean as it gets: log-sum-exp, a residual row, inverse CDF from the same uniforms;
with filters, topk first and the rest on the tokens that it kept.

The functions are what `compiled_pytorch` compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.case import Rival
from bench.distribution import Select, kept_tokens
from bench.inputs import ChainInputs
from specens_kernels import Sampling, TokenTree


def mix(weights: tuple[float, ...], probabilities: list[Tensor]) -> Tensor:
    total = probabilities[0] * weights[0]
    for weight, values in zip(weights[1:], probabilities[1:], strict=True):
        total = total + weight * values
    return total


def draw(masses: Tensor, random_numbers: Tensor) -> Tensor:
    """masses float32 [batch, vocab], uniforms float64 [batch]: int64 [batch]."""
    cumulative = masses.cumsum(-1)
    level = (random_numbers.float() * cumulative[:, -1])[:, None]
    return torch.searchsorted(cumulative, level, right=True)[:, 0].clamp(max=masses.shape[-1] - 1)


def verify(
    member_logits: list[Tensor],
    weights: tuple[float, ...],
    draft_logits: Tensor | None,
    draft_tokens: Tensor,
    uniforms: Tensor,
    draw: Callable[[Tensor, Tensor], Tensor] = draw,
) -> Tensor:
    """The emitted tokens, int64 [batch, draft_len + 1], padded with -1."""
    batch, draft_len = draft_tokens.shape
    members = [logits.float() for logits in member_logits]
    normalisers = [logits.logsumexp(-1) for logits in members]
    if draft_logits is None:
        draft, draft_normaliser = members[0][:, :draft_len], normalisers[0][:, :draft_len]
    else:
        draft = draft_logits.float()
        draft_normaliser = draft.logsumexp(-1)

    def at_tokens(logits: Tensor, normaliser: Tensor) -> Tensor:
        return (logits[:, :draft_len].gather(2, draft_tokens[..., None])[..., 0] - normaliser[:, :draft_len]).exp()

    target_at_token = mix(weights, [at_tokens(*pair) for pair in zip(members, normalisers, strict=True)])
    accepted = uniforms[:, :draft_len] * at_tokens(draft, draft_normaliser) < target_at_token
    num_accepted = accepted.long().cumprod(1).sum(1)

    request = torch.arange(batch, device=draft_tokens.device)

    def row(logits: Tensor, normaliser: Tensor, step: Tensor) -> Tensor:
        return (logits[request, step] - normaliser[request, step][:, None]).exp()

    masses = mix(weights, [row(*pair, num_accepted) for pair in zip(members, normalisers, strict=True)])
    rejected = (num_accepted < draft_len)[:, None]
    masses = (masses - rejected * row(draft, draft_normaliser, num_accepted.clamp(max=draft_len - 1))).clamp(min=0)
    return emitted(draft_tokens, num_accepted, draw(masses, uniforms[:, draft_len]))


def emitted(draft_tokens: Tensor, num_accepted: Tensor, next_token: Tensor) -> Tensor:
    """The accepted drafts, the next token, then -1: int64 [batch, draft_len + 1]."""
    draft_len = draft_tokens.shape[1]
    columns = torch.arange(draft_len + 1, device=draft_tokens.device)
    tokens = torch.nn.functional.pad(draft_tokens, (0, 1), value=-1)
    tokens = torch.where(columns < num_accepted[:, None], tokens, -1)
    return torch.where(columns == num_accepted[:, None], next_token[:, None], tokens)


def verify_filtered(
    logits: Tensor,
    sampling: Sampling,
    draft_logits: Tensor,
    draft_tokens: Tensor,
    uniforms: Tensor,
    select: Select = torch.topk,
) -> Tensor:
    """As `verify`, for one member and after top-k and top-p; nothing after topk is as wide as the vocabulary."""
    batch, draft_len = draft_tokens.shape
    target, target_ids = kept_tokens(logits, sampling, select)  # [batch, draft_len + 1, kept]
    draft, draft_ids = kept_tokens(draft_logits, sampling, select)  # [batch, draft_len, kept]

    def at_tokens(probabilities: Tensor, ids: Tensor) -> Tensor:
        return (probabilities * (ids == draft_tokens[..., None])).sum(-1)

    target_at_token = at_tokens(target[:, :draft_len], target_ids[:, :draft_len])
    accepted = uniforms[:, :draft_len] * at_tokens(draft, draft_ids) < target_at_token
    num_accepted = accepted.long().cumprod(1).sum(1)

    request = torch.arange(batch, device=draft_tokens.device)
    draft_row = request, num_accepted.clamp(max=draft_len - 1)
    same_token = target_ids[request, num_accepted][..., None] == draft_ids[draft_row][:, None, :]
    draft_at_kept = (same_token * draft[draft_row][:, None, :]).sum(-1)
    rejected = (num_accepted < draft_len)[:, None]
    masses = (target[request, num_accepted] - rejected * draft_at_kept).clamp(min=0)
    ids, order = target_ids[request, num_accepted].sort(-1)  # as a draw over the whole vocabulary goes
    index = draw(masses.gather(-1, order), uniforms[:, draft_len])
    return emitted(draft_tokens, num_accepted, ids.gather(-1, index[:, None])[:, 0])


def verify_trees(
    member_logits: list[Tensor], draft_logits: Tensor, draft_tokens: Tensor, tree: TokenTree, uniforms: Tensor
) -> Tensor:
    """As `verify`, for trees whose children were drawn without replacement: all rows at once, then child by child."""
    batch, width = len(draft_tokens), tree.num_levels + 1
    share = (1 / len(member_logits),) * len(member_logits)
    target = mix(share, [logits.float().softmax(-1) for logits in member_logits])
    draft = draft_logits.float().softmax(-1)
    children = [tree.children(node).tolist() for node in range(-1, tree.num_nodes)]
    tokens, random_numbers = draft_tokens.tolist(), uniforms.tolist()
    results = torch.full((batch, width), -1)
    for request in range(batch):
        row, depth, waiting = 0, 0, list(children[0])
        left, proposed = target[request, 0], draft[request, 0].clone()
        while waiting:
            node = waiting.pop(0)
            token = tokens[request][node]
            if random_numbers[request][node] * float(proposed[token]) < float(left[token]):
                results[request, depth] = token
                row, depth, waiting = node + 1, depth + 1, list(children[node + 1])
                left, proposed = target[request, row], draft[request, row].clone()
                continue
            left = (left - proposed).clamp(min=0)
            left = left / left.sum()
            proposed[token] = 0
            proposed /= proposed.sum()
        results[request, depth] = draw(left[None], uniforms[request, -1:])[0]
    return results


def draw_from_softmax(logits: Tensor, uniforms: Tensor) -> Tensor:
    return draw(logits.float().softmax(-1), uniforms)


def mixture_logprobs(member_logits: list[Tensor], weights: tuple[float, ...]) -> Tensor:
    if len(member_logits) == 1:
        return member_logits[0].float().log_softmax(-1)
    return mix(weights, [logits.float().softmax(-1) for logits in member_logits]).log()


def verify_chain(inputs: ChainInputs, prepare: Callable[[Any], Any] = lambda function: function) -> Rival | None:
    """prepare: turns the function into what is run. None for a filtered ensemble and for a temperature alone."""
    drafts = (inputs.draft_logits, inputs.draft_tokens, inputs.uniforms)
    arguments: tuple[Any, ...]
    if inputs.sampling.filters:
        if len(inputs.member_logits) > 1:
            return None
        function, arguments = prepare(verify_filtered), (inputs.member_logits[0], inputs.sampling, *drafts)
    elif inputs.sampling.temperature != 1:
        return None
    else:
        function, arguments = prepare(verify), (inputs.member_logits, inputs.weights, *drafts)
    return Rival(lambda: function(*arguments), checked=True)


def verify_tree(inputs: Any) -> Rival | None:
    """None for the rule traversal."""
    if inputs.rule != "token":
        return None
    arguments = (inputs.member_logits, inputs.draft_logits, inputs.draft_tokens, inputs.tree, inputs.uniforms)
    return Rival(lambda: verify_trees(*arguments), checked=True)


def sample(inputs: tuple[Tensor, Tensor], function: Callable[..., Tensor] = draw_from_softmax) -> Rival:
    return Rival(lambda: function(*inputs), checked=True)


def target_logprobs(
    inputs: tuple[list[Tensor], tuple[float, ...]], function: Callable[..., Tensor] = mixture_logprobs
) -> Rival:
    return Rival(lambda: function(*inputs), checked=True)


def uniforms(batch: int) -> Rival:
    """Numbers of torch's global generator, which are not a request's own."""
    return Rival(lambda: torch.rand(batch, dtype=torch.float64), checked=False)
