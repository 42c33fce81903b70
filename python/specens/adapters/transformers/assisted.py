"""Assisted generation of transformers, verified by `verify_chain` while `enable` holds.

transformers keeps its loop: candidate generators, caches, stopping criteria, streamers and outputs are its own.
Replaced is the choice of the tokens, `_speculative_sampling`, to which every round is led: also greedy ones, and those
whose drafts have no distribution. Of the processors, the loop gets only those that cannot be folded into that choice.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from types import TracebackType
from typing import Any

import transformers
from torch import Tensor
from transformers.generation import utils

from specens.adapters.transformers.gumbel import sample_by_gumbel
from specens.adapters.transformers.verification import RULES, Verification
from specens.engines.transformers.kv_cache import check_capacity

CURRENT: ContextVar[Verification | None] = ContextVar("the assisted generation that runs in this thread", default=None)
OWNERS: dict[str, Any] = {
    "_assisted_decoding": utils.GenerationMixin,
    "_get_candidate_generator": utils.GenerationMixin,
    "_sample": utils.GenerationMixin,
    "_speculative_sampling": utils,
}
EXPECTED_PARAMETERS = {
    "_assisted_decoding": ("logits_processor", "generation_config"),
    "_get_candidate_generator": ("logits_processor", "generation_config"),
    "_sample": ("input_ids", "logits_processor", "stopping_criteria", "generation_config"),
    "_speculative_sampling": ("candidate_input_ids", "candidate_logits", "candidate_length", "new_logits"),
}
_originals: dict[str, Callable[..., Any]] = {}  # of transformers; kept, as a generation may outlive what enabled it
_enabled_rule: str | None = None


class Enabled:
    """What `enable` returns; at the end of its `with` block, things are as they were before."""

    def __init__(self, rule_before: str | None) -> None:
        self._rule_before = rule_before

    def __enter__(self) -> Enabled:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._rule_before is None:
            disable()
        else:
            enable(self._rule_before)


def enable(rule: str = "token") -> Enabled:
    """Let assisted generation of every model verify through `verify_chain`, until `disable` or the end of a `with`.

    It concerns `generate` with `assistant_model`, `prompt_lookup_num_tokens` or `assistant_early_exit`, in the whole
    process. Temperature, top-k, top-p and min-p are folded into the call where they end the list of processors; all
    others run as before, position by position after the drafts. Sampled tokens follow the target exactly, whatever
    drafted them; of two tokens with equal logits on the edge of a filter, both are kept. Greedy texts are those of
    plain greedy generation. `assistant_ensemble_weight` w gives every token the distribution w * target + (1 - w) *
    assistant. A seed is drawn from torch's global generator for each generation: `set_seed` reproduces it.

    rule: "token"; or "gumbel": a seed is a text. Then sampling without an assistant is replaced too (`do_sample`), and
        writes for a seed the text that it writes with any assistant, as far as the logits are the same: rounding apart,
        drafts change the speed only. A position is the number of tokens before it, without padding.

    Raises ValueError for another rule, RuntimeError where this release of transformers is not built as expected.
    """
    global _enabled_rule
    if rule not in RULES:
        raise ValueError(f"rule: expected {' or '.join(map(repr, RULES))}, got {rule!r}")
    rule_before = _enabled_rule
    if not _is_enabled():
        originals = {name: getattr(owner, name) for name, owner in OWNERS.items() if hasattr(owner, name)}
        _check(originals)
        _originals.update(originals)
        for name, stand_in in STAND_INS.items():
            setattr(OWNERS[name], name, functools.wraps(_originals[name])(stand_in))
    _enabled_rule = rule
    return Enabled(rule_before)


def disable() -> None:
    """Give transformers its own verification back."""
    global _enabled_rule
    _enabled_rule = None
    if _is_enabled():
        for name, original in _originals.items():
            setattr(OWNERS[name], name, original)


def _is_enabled() -> bool:
    return getattr(utils, "_speculative_sampling", None) is _speculative_sampling


def _check(originals: dict[str, Any]) -> None:
    for name, parameters in EXPECTED_PARAMETERS.items():
        found = tuple(inspect.signature(originals[name]).parameters) if name in originals else ()
        missing = [parameter for parameter in parameters if parameter not in found]
        if missing:
            raise RuntimeError(
                f"transformers {transformers.__version__}: expected {name} with {', '.join(missing)}, got {found}"
            )


def _assisted_decoding(
    model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **rest: Any
) -> Any:
    verification = Verification(generation_config, logits_processor, _enabled_rule or "token")
    cache = rest.get("cache", rest.get("past_key_values"))
    if verification.ensemble is not None and hasattr(cache, "layers"):  # the last token is a draft, and is fed too
        check_capacity(cache, generation_config.max_length)
    config = copy.copy(generation_config)
    config.do_sample, config.assistant_ensemble_weight = True, None  # so that the loop asks `_speculative_sampling`
    token = CURRENT.set(verification)
    try:
        return _originals["_assisted_decoding"](
            model,
            input_ids,
            logits_processor=verification.kept,
            stopping_criteria=stopping_criteria,
            generation_config=config,
            **rest,
        )
    finally:
        CURRENT.reset(token)


def _sample(
    model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **rest: Any
) -> Any:
    loop = (model, input_ids, logits_processor, stopping_criteria, generation_config)
    verification = CURRENT.get()  # then this is its assistant
    rule = _enabled_rule if verification is None else verification.rule
    if rule != "gumbel" or not generation_config.do_sample:
        return _originals["_sample"](*loop, **rest)
    return sample_by_gumbel(_originals["_sample"], None if verification is None else verification.seed, *loop, **rest)


def _get_candidate_generator(model: Any, *arguments: Any, **keywords: Any) -> Any:
    verification = CURRENT.get()
    original = _originals["_get_candidate_generator"]
    if verification is None:
        return original(model, *arguments, **keywords)
    keywords |= {"generation_config": verification.config, "logits_processor": verification.processors_for_drafts()}
    generator = original(model, *arguments, **keywords)
    verification.watch(generator)
    return generator


def _speculative_sampling(
    candidate_input_ids: Tensor,
    candidate_logits: Tensor,
    candidate_length: int,
    new_logits: Tensor,
    *others: Any,  # what releases differ in: whether the drafts end the text, or the ensemble's weight
    **rest: Any,
) -> Any:
    candidates = (candidate_input_ids, candidate_logits, candidate_length, new_logits)
    verification = CURRENT.get()
    if verification is None:
        return _originals["_speculative_sampling"](*candidates, *others, **rest)
    return verification.verify(*candidates)


STAND_INS: dict[str, Callable[..., Any]] = {
    "_assisted_decoding": _assisted_decoding,
    "_get_candidate_generator": _get_candidate_generator,
    "_sample": _sample,
    "_speculative_sampling": _speculative_sampling,
}
