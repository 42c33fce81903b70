"""A draw from the target on a GPU: the verification of a chain without drafts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from specens_kernels.arguments import TARGET_LOGPROBS, Coins, Report, Rule, Stream, Unpacker, ready_for_kernels
from specens_kernels.ops.sample.reference import one_step
from specens_kernels.ops.verify_chain.triton_kernel import Call, decide, launches, new_outcome
from specens_kernels.ops.verify_chain.triton_report import new_results, raw_view
from specens_kernels.parts.coins import CoinView
from specens_kernels.parts.draft import DraftView
from specens_kernels.parts.examples import example_coins, example_targets
from specens_kernels.parts.launches import AotVariant, aot_variant
from specens_kernels.parts.rules import new_rule
from specens_kernels.parts.statistics import new_statistics
from specens_kernels.parts.target import batch_of, target_view
from specens_kernels.types import RuleKind

TOKEN_RULE = Rule(int(RuleKind.TOKEN), 0.0, 0.0)  # without drafts every rule is a plain draw


def launch(*flat: Any) -> list[Tensor]:
    """tokens int64 [batch], status int32 [batch], and what is reported; see `Draw`."""
    unpacker = Unpacker(flat)
    arguments = unpacker.target()
    coins, stream, report = unpacker.group(Coins), unpacker.group(Stream), unpacker.group(Report)
    if stream.best > 0:
        raise RuntimeError("this backend does not have the method 'gumbel'")
    ready = ready_for_kernels(one_step(unpacker.weighted(arguments)))
    target, coins = target_view(ready, 1), CoinView(*ready_for_kernels(coins))
    call = Call(target, raw_view(ready, report, 1), DraftView(), TOKEN_RULE, coins, stream.step, stream.stream, report)
    _, _, _, next_token, status, *reported = decide(call)
    return [next_token, status, *(values[:, 0] for values in reported)]


def aot_variants() -> list[AotVariant]:
    """(kernel, signature, constexprs) of the draw, for compilation without a GPU; the pass is target_logprobs' own."""
    variants = []
    for index, target in enumerate(example_targets()[1::2]):
        target = target._replace(steps=1)
        statistics = new_statistics(target, DraftView())
        results = new_results(batch_of(target), 1, Report(TARGET_LOGPROBS, 0), target.logits[0].device)
        outcome = new_outcome(results, statistics, RuleKind.TOKEN, logprobs=True)
        rule = new_rule(statistics, DraftView(), TOKEN_RULE, batch_of(target))
        *_, draw = launches(outcome, statistics, target, DraftView(), rule, example_coins(index), 0, 2)
        variants.append(aot_variant(draw))
    return variants
