"""A draw from the target on a GPU: the verification of a chain without drafts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specens_kernels.checks import Target
from specens_kernels.ops.verify_chain.rules import RuleKind
from specens_kernels.ops.verify_chain.triton_kernel import decide, launches, new_outcome
from specens_kernels.parts.coins import CoinView
from specens_kernels.parts.examples import example_coins, example_targets
from specens_kernels.parts.launches import AotVariant, aot_variant
from specens_kernels.parts.rules import new_rule
from specens_kernels.parts.statistics import new_statistics
from specens_kernels.parts.target import DraftView, target_view

TOKEN_RULE = (int(RuleKind.TOKEN), 0.0, 0.0)  # without drafts every rule is a plain draw


def launch(*flat: Any) -> tuple[Tensor, Tensor, Tensor]:
    """tokens int64 [batch], logprobs float32 [batch] (empty unless asked for), status int32 [batch]."""
    arguments, (*coins, step, stream, logprobs) = Target.split(flat)
    rows = [logits[:, None] for logits in arguments.member_logits]
    target = target_view(arguments._replace(member_logits=rows))
    outcome = decide(target, DraftView(), TOKEN_RULE, CoinView(*coins), step, stream, logprobs)
    emitted = torch.empty(0, device=outcome.tokens.device) if outcome.logprobs is None else outcome.logprobs[:, 0]
    return outcome.next_token, emitted, outcome.status


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
