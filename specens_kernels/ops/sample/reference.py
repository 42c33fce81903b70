"""The definition of a draw by inverse CDF, in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specens_kernels.checks import Target
from specens_kernels.ops.target_logprobs.reference import ensemble_logprobs, target_probs
from specens_kernels.ops.uniforms.reference import uniforms as philox_uniforms
from specens_kernels.types import Status


def invalid_coin(coins: Tensor) -> Tensor:
    return ~((coins >= 0) & (coins < 1))


def draw(masses: Tensor, coins: Tensor) -> Tensor:
    """The lowest token whose cumulative mass exceeds coin * total mass; -1 where no token has mass.

    masses: float64 [..., vocab], >= 0, of any total. coins: float64 [...] in [0, 1).
    """
    cumulative = masses.cumsum(-1)
    reached = cumulative > (coins * cumulative[..., -1])[..., None]
    has_mass = masses > 0
    last = (has_mass * torch.arange(masses.shape[-1], device=masses.device)).amax(-1)  # where rounding reaches none
    token = torch.where((reached & has_mass).any(-1), (reached & has_mass).int().argmax(-1), last)
    return torch.where(has_mass.any(-1), token, -1)


def sample(*flat: Any) -> tuple[Tensor, Tensor, Tensor]:
    """tokens int64 [batch], logprobs float32 [batch] (empty unless asked for), status int32 [batch]."""
    target, (uniforms, seeds, positions, step, stream, logprobs) = Target.split(flat)
    rows = ensemble_logprobs(target._replace(member_logits=[logits[:, None] for logits in target.member_logits]))
    coins = torch.zeros_like(rows.greedy, dtype=torch.float64)
    if uniforms is not None:
        coins = uniforms
    elif seeds is not None and positions is not None:
        coins = philox_uniforms(seeds, positions, step, stream)
    invalid = rows.invalid | (invalid_coin(coins) & ~rows.greedy)
    status = torch.where(invalid, Status.INVALID_PARAMETER, rows.status[:, 0])
    tokens = torch.where(invalid, -1, draw(target_probs(rows)[:, 0], coins))
    if not logprobs:
        return tokens, torch.empty(0, device=tokens.device), status.int()
    chosen = rows.logprobs[:, 0].gather(-1, tokens.clamp(min=0)[:, None])[:, 0]
    return tokens, torch.where(tokens >= 0, chosen, 0.0).float(), status.int()
