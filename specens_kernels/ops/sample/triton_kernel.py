"""A draw from the target on a GPU: the verification of a chain without drafts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from specens_kernels.arguments import NO_LOGPROBS, Coins, Report, Stream, Unpacker, ready_for_kernels
from specens_kernels.ops.sample.reference import one_step
from specens_kernels.ops.verify_chain.triton_kernel import decide, launches, new_outcome
from specens_kernels.parts.coins import CoinView
from specens_kernels.parts.examples import example_coins, example_targets
from specens_kernels.parts.launches import AotVariant, aot_variant
from specens_kernels.parts.refusals import refuse
from specens_kernels.parts.rules import new_rule
from specens_kernels.parts.statistics import new_statistics
from specens_kernels.parts.target import DraftView, target_view
from specens_kernels.types import RuleKind

TOKEN_RULE = (int(RuleKind.TOKEN), 0.0, 0.0)  # without drafts every rule is a plain draw


def launch(*flat: Any) -> list[Tensor]:
    """tokens int64 [batch], status int32 [batch], and what is reported; see `Draw`."""
    unpacker = Unpacker(flat)
    arguments = unpacker.target()
    coins, stream, report = unpacker.group(Coins), unpacker.group(Stream), unpacker.group(Report)
    arguments = one_step(unpacker.weighted(arguments))
    refuse(arguments, report=report)
    target = target_view(ready_for_kernels(arguments))
    logprobs = report.logprobs != NO_LOGPROBS
    outcome = decide(
        target, DraftView(), TOKEN_RULE, CoinView(*ready_for_kernels(coins)), stream.step, stream.stream, logprobs
    )
    reported = [] if outcome.logprobs is None else [outcome.logprobs[:, 0]]
    return [outcome.next_token, outcome.status, *reported]


def aot_variants() -> list[AotVariant]:
    """(kernel, signature, constexprs) of the draw, for compilation without a GPU; the pass is target_logprobs' own."""
    variants = []
    for index, target in enumerate(example_targets()[1::2]):
        target = target._replace(steps=1)
        statistics = new_statistics(target, DraftView())
        outcome = new_outcome(statistics, target, DraftView(), RuleKind.TOKEN, logprobs=True)
        rule = new_rule(statistics, DraftView(), *TOKEN_RULE)
        *_, draw = launches(outcome, statistics, target, DraftView(), rule, example_coins(index), 0, 2)
        variants.append(aot_variant(draw))
    return variants
