"""The operations in plain PyTorch, as lean as it gets: log-sum-exp, one residual row, inverse CDF from the same coins.

The functions are what `compiled_pytorch` compiles.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bench.case import Rival
from bench.inputs import ChainInputs


def mix(weights: tuple[float, ...], probabilities: list[Tensor]) -> Tensor:
    total = probabilities[0] * weights[0]
    for weight, values in zip(weights[1:], probabilities[1:], strict=True):
        total = total + weight * values
    return total


def draw(masses: Tensor, coins: Tensor) -> Tensor:
    """masses float32 [batch, vocab], coins float64 [batch]: int64 [batch]."""
    cumulative = masses.cumsum(-1)
    level = (coins.float() * cumulative[:, -1])[:, None]
    return torch.searchsorted(cumulative, level, right=True)[:, 0].clamp(max=masses.shape[-1] - 1)


def verify(
    member_logits: list[Tensor],
    weights: tuple[float, ...],
    draft_logits: Tensor | None,
    draft_tokens: Tensor,
    uniforms: Tensor,
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
    next_token = draw(masses, uniforms[:, draft_len])

    columns = torch.arange(draft_len + 1, device=draft_tokens.device)
    tokens = torch.nn.functional.pad(draft_tokens, (0, 1), value=-1)
    tokens = torch.where(columns < num_accepted[:, None], tokens, -1)
    return torch.where(columns == num_accepted[:, None], next_token[:, None], tokens)


def draw_from_softmax(logits: Tensor, uniforms: Tensor) -> Tensor:
    return draw(logits.float().softmax(-1), uniforms)


def mixture_logprobs(member_logits: list[Tensor], weights: tuple[float, ...]) -> Tensor:
    if len(member_logits) == 1:
        return member_logits[0].float().log_softmax(-1)
    return mix(weights, [logits.float().softmax(-1) for logits in member_logits]).log()


def verify_chain(inputs: ChainInputs, function: Callable[..., Tensor] = verify) -> Rival:
    arguments = (inputs.member_logits, inputs.weights, inputs.draft_logits, inputs.draft_tokens, inputs.uniforms)
    return Rival(lambda: function(*arguments), checked=True)


def sample(inputs: tuple[Tensor, Tensor], function: Callable[..., Tensor] = draw_from_softmax) -> Rival:
    return Rival(lambda: function(*inputs), checked=True)


def target_logprobs(
    inputs: tuple[list[Tensor], tuple[float, ...]], function: Callable[..., Tensor] = mixture_logprobs
) -> Rival:
    return Rival(lambda: function(*inputs), checked=True)


def uniforms(batch: int) -> Rival:
    """Numbers of torch's global generator, which are not a request's own."""
    return Rival(lambda: torch.rand(batch, dtype=torch.float64), checked=False)
