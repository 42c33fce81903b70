"""sample: one token a request from the target distribution of an ensemble."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from specens_kernels.arguments import SCHEMA, Flat
from specens_kernels.backend import implementations, run_operator
from specens_kernels.checks import check_coins, check_members, check_report, check_target, fail
from specens_kernels.ops.sample import reference
from specens_kernels.packing import pack, report_part, target_parts
from specens_kernels.types import Draw, Ensemble, Processing, Sampling

IMPLEMENTATIONS = implementations("sample", f"({SCHEMA}) -> Tensor[]", reference.sample)


class SampleCall(NamedTuple):
    """The arguments of `sample`."""

    member_logits: Tensor | Sequence[Tensor]
    ensemble: Ensemble | None
    sampling: Sampling
    processing: Processing | None
    allowed: Tensor | None
    seeds: Tensor | None
    positions: Tensor | None
    step: int
    stream: int
    uniforms: Tensor | None
    logprobs: bool | str
    top_logprobs: int
    backend: str | None


def sample(
    member_logits: Tensor | Sequence[Tensor],
    *,
    ensemble: Ensemble | None = None,
    sampling: Sampling = Sampling(),
    processing: Processing | None = None,
    allowed: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    step: int = 0,
    stream: int = 2,
    uniforms: Tensor | None = None,
    logprobs: bool | str = False,
    top_logprobs: int = 0,
    backend: str | None = None,
) -> Draw:
    """Draw one token a request by inverse CDF from one coin.

    member_logits: float32, bfloat16 or float16 [batch, vocab], a tensor or one a member (vocabularies may differ).
    allowed: int32 [batch, words], as in `verify_chain`.
    ensemble, sampling, processing, seeds, positions, logprobs, top_logprobs, backend, errors: as in `verify_chain`.
    step, stream: which random number of (seed, position) is used; a draft token takes the absolute position of its
        round's first draft, its offset in the round as step, and stream 2.
    uniforms: float64 or float32 [batch] in [0, 1), instead of seeds and positions.
    """
    source = (seeds, positions, step, stream, uniforms)
    call = SampleCall(member_logits, ensemble, sampling, processing, allowed, *source, logprobs, top_logprobs, backend)
    tokens, status, *reported = run_operator(IMPLEMENTATIONS, "sample", call, _flatten, _check)
    return Draw(tokens, reported[0] if reported else None, status, *reported[1:])


def _flatten(call: SampleCall, members: Sequence[Tensor]) -> Flat:
    target = target_parts(members, call.ensemble, call.sampling, call.processing, call.allowed)
    coins = (call.uniforms, call.seeds, call.positions), (), ()
    stream = (), (call.step, call.stream), ()
    report = report_part(call.logprobs, call.top_logprobs)
    return pack(members, call.ensemble, (*target, coins, stream, report))


def _check(call: SampleCall) -> None:
    """Raise ValueError naming an argument that is wrong."""
    members = check_members(call.member_logits, dims=2)
    batch, device = members[0].shape[0], members[0].device
    check_target(members, batch, call.ensemble, call.sampling, call.processing, call.allowed)
    check_coins(call.uniforms, call.seeds, call.positions, (batch,), device, not call.sampling.greedy)
    for name in ("step", "stream"):
        value = getattr(call, name)
        if isinstance(value, bool) or not isinstance(value, int):
            fail(name, "an integer", repr(value))
    check_report(call.logprobs, call.top_logprobs)
