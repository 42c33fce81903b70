"""Chain verification on a GPU: a pass over the logits, the residual's block masses, and the draw.

The second launch is there only where a draft may come from a distribution; it reads the row of the first rejected
draft once more, since which row that is depends on all of it. Draws from the target and greedy requests need no logits
but those of one block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specens_kernels.arguments import NO_LOGPROBS, ChainArguments, ready_for_kernels
from specens_kernels.ops.target_logprobs.triton_kernel import run, statistics_launches
from specens_kernels.parts.chain import (
    FROM_RESIDUAL,
    MOST_LIKELY,
    NOTHING,
    CoinView,
    Outcome,
    coins_of,
    walk,
)
from specens_kernels.parts.draw import block_probabilities, draw_token, row_states
from specens_kernels.parts.examples import example_coins, example_draft, example_targets
from specens_kernels.parts.launches import AotVariant, Launch, aot_variant
from specens_kernels.parts.refusals import refuse
from specens_kernels.parts.statistics import (
    Statistics,
    log_probability,
    new_statistics,
    target_state,
    top_tokens,
)
from specens_kernels.parts.target import (
    DraftView,
    TargetView,
    draft_view,
    target_view,
)

STREAM_NEXT = 1
RESIDUAL_WARPS, DRAW_WARPS = 8, 16
LARGEST_BLOCK_STEPS, TESTED_NUMBERS = 8, 1024  # draft tokens tested at once, statistics of a plane read for them


@triton.jit
def _residual_kernel(
    residual_masses_ptr,  # float32 [batch, blocks], written where the next token comes from a residual
    outcome,  # Outcome, written but for the next token
    statistics,  # Statistics
    target,  # TargetView
    draft,  # DraftView
    coins,  # CoinView
    BLOCK_STEPS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    num_accepted, kind, status = walk(outcome, statistics, target, draft, coins, request, block == 0, BLOCK_STEPS)
    if block == 0:
        tl.store(outcome.num_accepted + request, num_accepted)
        tl.store(outcome.kinds + request, kind)
        tl.store(outcome.status + request, status)
    if kind != FROM_RESIDUAL:
        return
    step = tl.zeros([1], tl.int64) + num_accepted
    state, own_state, drafter = row_states(statistics, target, draft, request, step, kind == FROM_RESIDUAL)
    tokens = block * statistics.BLOCK_VOCAB + tl.arange(0, statistics.BLOCK_VOCAB)
    probabilities, draft_probabilities = block_probabilities(
        statistics, target, draft, state, own_state, request, num_accepted, tokens, drafter, kind == FROM_RESIDUAL
    )
    mass = tl.sum(tl.maximum(probabilities - draft_probabilities, 0.0), 0)
    tl.store(residual_masses_ptr + request * statistics.blocks + block, mass)


@triton.jit(do_not_specialize=["first_step", "coin_stream"])
def _next_token_kernel(
    outcome,  # Outcome, the rest written
    residual_masses_ptr,  # float32 [batch, blocks], or None: there are no residuals, and the chain is yet to be walked
    statistics,  # Statistics
    target,  # TargetView
    draft,  # DraftView
    coins,  # CoinView
    first_step,  # of the coins' steps
    coin_stream,  # of the next token's coin
    BLOCK_STEPS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    if residual_masses_ptr is None:
        num_accepted, kind, status = walk(outcome, statistics, target, draft, coins, request, True, BLOCK_STEPS)
        tl.store(outcome.num_accepted + request, num_accepted)
    else:
        num_accepted = tl.load(outcome.num_accepted + request)
        kind = tl.load(outcome.kinds + request)
        status = tl.load(outcome.status + request)
    step = tl.zeros([1], tl.int64) + num_accepted
    rows = request * target.steps + step
    token = -1
    logprob = 0.0
    if kind != NOTHING:
        if kind == MOST_LIKELY:
            if statistics.TOP_PLANE >= 0:
                token = tl.max(top_tokens(statistics, rows, rows >= 0), 0)
        else:
            coin = tl.max(
                coins_of(coins, draft, request, draft.draft_len, step + first_step, coin_stream, step >= 0), 0
            )
            token, bits = draw_token(residual_masses_ptr, statistics, target, draft, request, num_accepted, kind, coin)
            status |= bits
        if outcome.logprobs is not None:
            state, _ = target_state(statistics, target, request, rows, rows >= 0)
            tokens = (rows & 0) + token
            own = log_probability(statistics, target, state, request, step, tokens, tokens >= 0, tl.float64)
            logprob = tl.max(own, 0).to(tl.float32)
    first = request * (draft.draft_len + 1)
    unused = num_accepted < draft.draft_len  # the last column lies behind the next token
    tl.store(outcome.tokens + first + num_accepted, token)
    tl.store(outcome.tokens + first + draft.draft_len, -1, mask=unused)
    if outcome.logprobs is not None:
        tl.store(outcome.logprobs + first + num_accepted, logprob)
        tl.store(outcome.logprobs + first + draft.draft_len, 0.0, mask=unused)
    tl.store(outcome.num_tokens + request, num_accepted + (token >= 0).to(tl.int64))
    tl.store(outcome.next_token + request, token)
    tl.store(outcome.status + request, status)


def new_outcome(
    target: TargetView, draft: DraftView, logprobs: bool, residuals: bool, out: Sequence[Tensor] | None = None
) -> Outcome:
    """Unwritten results, in `out` where it is given."""
    batch, device = target.logits[0].shape[0], target.logits[0].device
    columns = (batch, draft.draft_len + 1)
    if out is None:
        sizes = [(columns, torch.int64), *[((batch,), torch.int64)] * 3, ((batch,), torch.int32)]
        sizes += [(columns, torch.float32)] * logprobs
        out = [torch.empty(size, dtype=dtype, device=device) for size, dtype in sizes]
    tokens, num_accepted, num_tokens, next_token, status, *reported = out
    return Outcome(
        tokens=tokens,
        num_accepted=num_accepted,
        num_tokens=num_tokens,
        next_token=next_token,
        logprobs=reported[0] if logprobs else None,
        status=status,
        kinds=torch.empty(batch, dtype=torch.int32, device=device) if residuals else None,
    )


def launches(
    outcome: Outcome,
    statistics: Statistics,
    target: TargetView,
    draft: DraftView,
    coins: CoinView,
    first_step: int,
    stream: int,
) -> Iterator[Launch]:
    """Two launches, and one between them where a residual may be drawn from; a chain of length 0 is a plain draw."""
    yield from statistics_launches(statistics, target, draft)
    batch, blocks = target.logits[0].shape[0], statistics.blocks
    block_steps = min(LARGEST_BLOCK_STEPS, max(1, TESTED_NUMBERS // statistics.BLOCK_COUNT.value))
    arguments = {
        "outcome": outcome,
        "residual_masses_ptr": None,
        "statistics": statistics,
        "target": target,
        "draft": draft,
        "coins": coins,
        "BLOCK_STEPS": block_steps,
    }
    if outcome.kinds is not None:
        masses = torch.empty(batch, blocks, dtype=torch.float32, device=outcome.tokens.device)
        arguments["residual_masses_ptr"] = masses
        yield Launch(_residual_kernel, (batch, blocks), arguments, RESIDUAL_WARPS)
    yield Launch(
        _next_token_kernel, (batch,), arguments | {"first_step": first_step, "coin_stream": stream}, DRAW_WARPS
    )


def decide(
    target: TargetView, draft: DraftView, coins: CoinView, first_step: int, stream: int, logprobs: bool, out=None
) -> Outcome:
    """Launch everything; out: where to write, in the order of an operator's results."""
    statistics = new_statistics(target, draft)
    outcome = new_outcome(target, draft, logprobs, residuals=statistics.DRAFT_PLANE.value >= 0, out=out)
    run(launches(outcome, statistics, target, draft, coins, first_step, stream), outcome.tokens)
    return outcome


def launch(*flat: Any) -> list[Tensor]:
    """tokens, num_accepted, num_tokens, next_token, status, and what is reported; see `Verdict`."""
    return _launch(flat, None)


def launch_out(*flat: Any) -> None:
    """As `launch`, into the tensors of the last argument."""
    _launch(flat[:-1], flat[-1])


def _launch(flat: Sequence[Any], out: Sequence[Tensor] | None) -> list[Tensor]:
    arguments = ChainArguments.unpack(flat)
    refuse(arguments.target, arguments.draft, arguments.rule.kind, arguments.report)
    target = target_view(ready_for_kernels(arguments.target))
    draft = draft_view(target, ready_for_kernels(arguments.draft))
    logprobs = arguments.report.logprobs != NO_LOGPROBS
    outcome = decide(target, draft, CoinView(*ready_for_kernels(arguments.coins)), 0, STREAM_NEXT, logprobs, out)
    reported = [] if outcome.logprobs is None else [outcome.logprobs]
    verdict = [outcome.tokens, outcome.num_accepted, outcome.num_tokens, outcome.next_token, outcome.status]
    return [*verdict, *reported]


def aot_variants() -> list[AotVariant]:
    """(kernel, signature, constexprs) of what is launched, for compilation without a GPU."""
    variants = []
    for index, target in enumerate(example_targets()):
        draft = example_draft(target, index)
        statistics = new_statistics(target, draft)
        outcome = new_outcome(target, draft, logprobs=index % 2 == 0, residuals=statistics.DRAFT_PLANE.value >= 0)
        steps = launches(outcome, statistics, target, draft, example_coins(index), 0, STREAM_NEXT)
        variants += [aot_variant(launch) for launch in steps]
    return variants
