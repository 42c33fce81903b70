"""The definition of draws by inverse CDF, and of what is reported, in float64; Gumbel scores are in `gumbel`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from specens_kernels.arguments import (
    NO_LOGPROBS,
    TARGET_LOGPROBS,
    RandomSource,
    Report,
    Stream,
    Target,
    report_of,
    stream_of,
    target_of,
    uniforms_of,
)
from specens_kernels.ops.sample.gumbel import best_tokens
from specens_kernels.ops.target_logprobs.reference import Distributions, ensemble_logprobs, raw, target_probs
from specens_kernels.ops.uniforms.reference import uniforms as philox_uniforms
from specens_kernels.results import Status


def invalid_uniform(random_numbers: Tensor) -> Tensor:
    return ~((random_numbers >= 0) & (random_numbers < 1))


def draw(masses: Tensor, random_numbers: Tensor) -> Tensor:
    """The lowest token whose cumulative mass exceeds uniform * total mass; -1 where no token has mass.

    masses: float64 [..., vocab], >= 0, of any total. uniforms: float64 [...] in [0, 1).
    """
    cumulative = masses.cumsum(-1)
    reached = cumulative > (random_numbers * cumulative[..., -1])[..., None]
    has_mass = masses > 0
    last = (has_mass * torch.arange(masses.shape[-1], device=masses.device)).amax(-1)  # where rounding reaches none
    token = torch.where((reached & has_mass).any(-1), (reached & has_mass).int().argmax(-1), last)
    return torch.where(has_mass.any(-1), token, -1)


def most_likely(logprobs: Tensor, count: int, chosen: Tensor) -> list[Tensor]:
    """What is reported of chosen tokens [...], -1 for none: their log-probability and the count most likely tokens.

    logprobs: float64 [..., vocab]. Returns float32 [...] and, where count is not 0, int64 and float32 [..., count]:
    most likely first, the lowest id on a tie; -1 and -inf where fewer have mass.
    """
    emitted = chosen >= 0
    vocab = logprobs.shape[-1]
    own = logprobs.gather(-1, chosen.clamp(0, vocab - 1)[..., None])[..., 0]
    own = torch.where(chosen < vocab, own, -math.inf)  # synthetic acceptance takes drafts that only the drafter knows
    reported = [torch.where(emitted, own, 0.0).float()]
    if count == 0:
        return reported
    missing = max(0, count - vocab)
    padded = torch.nn.functional.pad(logprobs, (0, missing), value=-math.inf)
    values, tokens = padded.sort(dim=-1, descending=True, stable=True)
    values = torch.where(emitted[..., None], values[..., :count], -math.inf)
    return [*reported, torch.where(values > -math.inf, tokens[..., :count], -1), values.float()]


def sample(member_logits: list[Tensor], **options: Any) -> list[Tensor]:
    """tokens int64 [batch], of best scores [batch, best], status int32 [batch], and what is reported; see `Draw`."""
    target, random_source = one_step(target_of(member_logits, options)), uniforms_of(options)
    stream, report = stream_of(options), report_of(options)
    rows = ensemble_logprobs(target)
    if stream.best > 0:
        positions = None if random_source.positions is None else (random_source.positions + stream.step)[:, None]
        tokens, invalid = best_tokens(rows, random_source.seeds, positions, stream.best)[:, 0], rows.invalid
    else:
        tokens, invalid = drawn(rows, random_source, stream)
        tokens = tokens[:, None]
    status = torch.where(invalid, Status.INVALID_PARAMETER, rows.status[:, 0])
    tokens = torch.where(invalid[:, None], -1, tokens)
    shaped = tokens if stream.best > 0 else tokens[:, 0]
    if report.logprobs == NO_LOGPROBS:
        return [shaped, status.int()]
    logprobs = rows.logprobs if report.logprobs == TARGET_LOGPROBS else ensemble_logprobs(raw(target)).logprobs
    own = most_likely(logprobs.expand(-1, tokens.shape[1], -1), 0, tokens)[0]
    return [shaped, status.int(), own.view_as(shaped), *most_likely(logprobs[:, 0], report.top, tokens[:, 0])[1:]]


def empty_draw(member_logits: list[Tensor], **options: Any) -> list[Tensor]:
    """Tensors of the shapes that `sample` gives, whose hundreds of steps take a tracer long."""
    rows, best = member_logits[0].shape[:1], stream_of(options).best
    tokens = member_logits[0].new_empty((*rows, best) if best > 0 else rows, dtype=torch.int64)
    return [tokens, tokens.new_empty(rows, dtype=torch.int32), *empty_report(report_of(options), tokens, rows)]


def empty_report(report: Report, tokens: Tensor, rows: tuple[int, ...]) -> list[Tensor]:
    """Tensors of the shapes of what is reported of tokens, and of the most likely ones of rows [...]."""
    if report.logprobs == NO_LOGPROBS:
        return []
    top = [(*rows, report.top)] * (report.top > 0)
    return [
        tokens.new_empty(tokens.shape, dtype=torch.float32),
        *(tokens.new_empty(shape, dtype=dtype) for shape in top for dtype in (torch.int64, torch.float32)),
    ]


def drawn(rows: Distributions, random_source: RandomSource, stream: Stream) -> tuple[Tensor, Tensor]:
    """A token by inverse CDF, int64 [batch], and whether a parameter is out of range, bool [batch]."""
    random_numbers = torch.zeros_like(rows.greedy, dtype=torch.float64)
    if random_source.uniforms is not None:
        random_numbers = random_source.uniforms.double()
    elif random_source.seeds is not None and random_source.positions is not None:
        random_numbers = philox_uniforms(random_source.seeds, random_source.positions, stream.step, stream.stream)
    return draw(target_probs(rows)[:, 0], random_numbers), rows.invalid | (
        invalid_uniform(random_numbers) & ~rows.greedy
    )


def one_step(target: Target) -> Target:
    """Logits [batch, vocab] as [batch, 1, vocab]."""
    allowed = None if target.allowed is None else target.allowed[:, None]
    return target._replace(member_logits=[logits[:, None] for logits in target.member_logits], allowed=allowed)
