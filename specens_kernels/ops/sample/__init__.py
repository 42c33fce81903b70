"""sample: one token a request from the target distribution of an ensemble."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specens_kernels.arguments import DRAFT_STREAM
from specens_kernels.backend import implementations, run_operator
from specens_kernels.buffers import check_out, report_shapes, reported
from specens_kernels.checks import check_members, check_random, check_report, check_target
from specens_kernels.ensembles import Ensemble
from specens_kernels.ops.sample import reference
from specens_kernels.packing import Options, add_random, add_report, sampling_numbers, target_options, whole
from specens_kernels.results import Draw
from specens_kernels.sampling import Processing, Sampling
from specens_kernels.values import fail, is_integer
from specens_kernels.workspace import Workspace

METHODS = ("inverse_cdf", "gumbel")
MOST_TOKENS = 4096  # of one row
IMPLEMENTATIONS = implementations("sample", reference.sample, fake=reference.empty_draw)


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
    stream: int | None
    uniforms: Tensor | None
    method: str
    num_best: int | None  # the argument count
    logprobs: bool | str
    top_logprobs: int
    out: Draw | None
    workspace: Workspace | None
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
    stream: int | None = None,
    uniforms: Tensor | None = None,
    method: str = "inverse_cdf",
    count: int | None = None,
    logprobs: bool | str = False,
    top_logprobs: int = 0,
    out: Draw | None = None,
    workspace: Workspace | None = None,
    backend: str | None = None,
) -> Draw:
    """Draw a token a request, by inverse CDF from one uniform number, or that of the best Gumbel score.

    member_logits: float32, bfloat16 or float16 [batch, vocab], a tensor or one a member (vocabularies may differ).
    allowed: int32 [batch, words], as in `verify_chain`.
    ensemble, sampling, processing, seeds, positions, logprobs, top_logprobs, backend, errors: as in `verify_chain`.
    step, stream: which random number of (seed, position) is used; a draft token takes the absolute position of its
        round's first draft, its offset in the round as step, and stream 2, which None stands for.
    uniforms: float64 or float32 [batch] in [0, 1), instead of seeds and positions.
    method: "inverse_cdf"; or "gumbel": the token of the largest log-probability + Gumbel noise, which is a function of
        the seed, the token's own position (positions + step) and its id. Then `verify_chain` with rule="gumbel" accepts
        the draft exactly where the target picks the same token, as often as target and drafter are alike. Takes seeds
        and positions; uniforms and stream play no part. README.md beside this file has the mathematics.
    out: a Draw of contiguous tensors to write into, as in `verify_chain`.
    workspace: a Workspace to take scratch memory on a GPU from, as in `verify_chain`.
    count: None, or with method="gumbel" so many tokens of the best scores, a sample without replacement: the siblings
        of a tree.
    """
    source = (seeds, positions, step, stream, uniforms, method, count)
    told = (logprobs, top_logprobs, out, workspace, backend)
    call = SampleCall(member_logits, ensemble, sampling, processing, allowed, *source, *told)
    one_column = method == "gumbel" and count is None
    if out is not None:
        columns = call if not one_column else call._replace(out=_with_column(out))
        run_operator(IMPLEMENTATIONS, "sample", columns, _pack, lambda _: _check(call), _out_names)
        return out
    tokens, status, *told = run_operator(IMPLEMENTATIONS, "sample", call, _pack, _check)
    logprobs_there = told[0] if told else None
    if one_column:
        tokens, logprobs_there = tokens[:, 0], None if logprobs_there is None else logprobs_there[:, 0]
    return Draw(tokens, logprobs_there, status, *told[1:])


def _out_names(call: SampleCall) -> tuple[str, ...]:
    """The fields of a Draw that a call fills, in the order of an operator's results."""
    return ("tokens", "status", *reported(call.logprobs, call.top_logprobs))


def _with_column(out: Any) -> Any:
    """Buffers [batch] as [batch, 1]."""
    if not isinstance(out, Draw):
        return out
    columns = {name: own.unsqueeze(-1) for name in ("tokens", "logprobs") if (own := getattr(out, name)) is not None}
    return out._replace(**columns)


def _pack(call: SampleCall, members: Sequence[Tensor]) -> tuple[tuple[Any, ...], Options]:
    sampling = sampling_numbers(call.sampling)
    options = target_options(members, call.ensemble, sampling, call.processing, call.allowed)
    add_random(options, call.uniforms, call.seeds, call.positions)
    add_report(options, call.logprobs, call.top_logprobs)
    step, best = whole("step", call.step), _best(call)
    stream = DRAFT_STREAM if call.stream is None else whole("stream", call.stream)
    if step != 0:
        options["step"] = step
    if stream != DRAFT_STREAM:
        options["stream"] = stream
    if best != 0:
        options["gumbel_count"] = best
    return (members,), options


def _best(call: SampleCall) -> int:
    """Of how many scores the tokens are wanted, 0 for a draw by inverse CDF."""
    if call.method == "inverse_cdf" and call.num_best is None:
        return 0
    if call.method != "gumbel" or call.stream is not None or call.uniforms is not None:
        raise ValueError("method")  # `_check` says what was expected
    return 1 if call.num_best is None else _whole_number(call.num_best)


def _whole_number(count: object) -> int:
    if not is_integer(count) or not 0 < count <= MOST_TOKENS:  # type: ignore[operator]
        fail("count", f"None or an integer from 1 to {MOST_TOKENS}", repr(count))
    return index(count)  # type: ignore[arg-type]


def _check_method(call: SampleCall) -> None:
    if call.method not in METHODS:
        fail("method", " or ".join(map(repr, METHODS)), repr(call.method))
    if call.method == "gumbel":
        for name in ("uniforms", "stream"):
            if getattr(call, name) is not None:
                fail(name, "None, as the noise of method 'gumbel' comes from seeds and positions", getattr(call, name))
    if call.num_best is not None:
        if call.method != "gumbel":
            fail("count", "None, as only method 'gumbel' gives several tokens", repr(call.num_best))
        _whole_number(call.num_best)


def _check(call: SampleCall) -> None:
    """Raise ValueError naming an argument that is wrong."""
    members = check_members(call.member_logits, dims=2)
    batch, device = members[0].shape[0], members[0].device
    check_target(members, batch, call.ensemble, call.sampling, call.processing, call.allowed)
    _check_method(call)
    check_random(call.uniforms, call.seeds, call.positions, (batch,), device, not call.sampling.greedy)
    for name, value in (("step", call.step), ("stream", 0 if call.stream is None else call.stream)):
        if not is_integer(value):
            fail(name, "an integer of 64 bits", repr(value))
    check_report(call.logprobs, call.top_logprobs)
    shape = (batch,) if call.num_best is None else (batch, call.num_best)
    told = report_shapes(shape, (batch, call.top_logprobs), reported(call.logprobs, call.top_logprobs))
    shapes = {"tokens": (shape, torch.int64), "status": ((batch,), torch.int32), **told}
    check_out(call.out, Draw, shapes, call._asdict(), device)
