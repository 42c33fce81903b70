"""What a planner must know of an ensemble on this machine: the cost of its forwards, and what it accepts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specens.analysis.planner import Candidate, GroupCost, Measured
from specens.decoding.ideal import least_acceptance
from specens.decoding.reader import Reader, open_reader
from specens.decoding.reads import read
from specens.decoding.request import counted_indices
from specens.decoding.statistics import Statistics
from specens.drafters import PromptLookup
from specens.engines.protocol import Engine, running
from specens.generate import Generation, SpeculativeEnsemble
from specens.schedules import Plan
from specens.settings.arguments import group_by_weights
from specens.settings.jobs import derived_seed
from specens.settings.prompts import MemberPrompts, prompts_for_members
from specens.targets import DenseTarget
from specens_kernels import Mixture, Sampling, target_logprobs

COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
WEIGHTS = (0.1, 0.3, 0.5, 0.7, 0.9)
ALREADY_READ = 32  # tokens of the text before those whose forwards are timed


def measure(
    ensemble: SpeculativeEnsemble,
    prompt: Any,
    *,
    sampling: Sampling | None = None,
    chat: bool = False,
    max_new_tokens: int = 128,
    samples: int = 2,
    repeats: int = 5,
    seed: int = 0,
    candidates: Sequence[Candidate] = (),
    lookup: PromptLookup | None = None,
    on_step: Callable[[str], None] | None = None,
) -> Measured:
    """Write some texts with the ensemble and measure what they tell.

    Every member reads the texts once more, whole, so that its chance of acceptance is known at each position, and
    forwards of different numbers of tokens are timed after one of them; medians of `repeats`, interleaved.
    candidates: whose forwards are wanted; without, those of the ensemble's own schedule. lookup: whose drafts are
    looked up at each position, for the candidates that it drafts for. on_step: called with what is being done.
    Raises ValueError for an ensemble that is computed densely, and as `SpeculativeEnsemble.generate`.
    """
    say = on_step or (lambda _: None)
    _check_predictable(ensemble.plan)
    prompts = prompts_for_members(prompt, ensemble.plan.num_members, ensemble.tokenizer, chat)
    texts = _write(ensemble, prompts, say, samples, seed, sampling=sampling, max_new_tokens=max_new_tokens)
    say("reading the texts")
    acceptance = [_acceptance(ensemble, prompts, text.tokens, sampling or Sampling()) for text in texts]
    groups = group_by_weights(ensemble.models)
    plan: Any = ensemble.plan
    drafter = plan.drafter if ensemble.schedule_name in ("fixed", "parallel") else plan.proposes_first
    chosen = candidates or [Candidate(ensemble.schedule_name, plan.draft_lens, drafter)]
    read = [one.read_together(groups) for one in [Candidate("standard", ()), *chosen]]
    together = sorted({tuple(indices) for each in read for indices in each})
    longest = max((one.draft_lens[0] for one in chosen if isinstance(one.drafter, str)), default=0)
    looked_up = [] if lookup is None else [_look_up(lookup, prompts[0], text.tokens, longest) for text in texts]
    say("timing forwards")
    with running(ensemble.models):
        costs, row_bytes = _costs(ensemble.models, prompts, texts[0].tokens, together, repeats)
    return Measured(
        costs=costs,
        outside=statistics.median(text.statistics.overhead_seconds / text.statistics.model_calls for text in texts),
        acceptance=acceptance,
        counted=counted_indices(ensemble.ensemble, len(prompts)),
        weights=_weights(ensemble, len(prompts)),
        groups=groups,
        least=_least_acceptance(ensemble, sampling or Sampling()),
        looked_up=looked_up,
        devices=devices_of(ensemble.models),
        row_bytes=row_bytes,
    )


def devices_of(models: Sequence[Engine]) -> tuple[int, ...]:
    """Of members in this process device 0, of each other one its own: theirs are read at the same time."""
    return tuple(1 + index if model.runs_elsewhere else 0 for index, model in enumerate(models))


def _look_up(lookup: PromptLookup, prompt: list[int], tokens: list[int], longest: int) -> list[tuple[int, int]]:
    """At every position of a text how many tokens are drafted, and how many of them are the ones that follow."""
    index, found = lookup.new_index(prompt), []
    for position, token in enumerate(tokens):
        (drafts,) = lookup.look_up([index], longest)
        pairs = zip(drafts, tokens[position:], strict=False)
        right = next((count for count, (draft, own) in enumerate(pairs) if draft != own), None)
        found.append((len(drafts), min(len(drafts), len(tokens) - position) if right is None else right))
        index.extend([token])
    return found


def _check_predictable(plan: Plan) -> None:
    """Raise ValueError for what is not predicted: drafters that are no member, trees, other rules, adapting lengths."""
    adapts = not all(isinstance(length, int) for length in plan.draft_lens)
    if not isinstance(plan.drafter, int) or plan.tree is not None or plan.rule != "token" or adapts:
        trees = "" if plan.tree is None else ", trees"
        raise ValueError(
            "ensemble: expected a member as drafter, chains, numbers as draft_lens and the rule 'token' to be planned "
            f"for, got {plan.drafter}, {plan.draft_lens}, {plan.rule!r}{trees}"
        )


def measure_weights(
    ensemble: SpeculativeEnsemble,
    measured: Measured,
    prompt: Any,
    *,
    sampling: Sampling | None = None,
    chat: bool = False,
    max_new_tokens: int = 128,
    samples: int = 2,
    seed: int = 0,
    on_step: Callable[[str], None] | None = None,
) -> dict[float, Measured]:
    """What a Mixture of two members accepts at other weights of the first one; costs are those measured already.

    Empty for other ensembles. The arguments are those of `measure`.
    """
    if not isinstance(ensemble.ensemble, Mixture) or ensemble.plan.num_members != 2:
        return {}
    prompts = prompts_for_members(prompt, 2, ensemble.tokenizer, chat)
    found = {}
    for weight in WEIGHTS:
        mixture = replace(ensemble.ensemble, weights=(weight, 1 - weight))
        own = SpeculativeEnsemble(ensemble.models, ensemble.tokenizer, mixture)
        say = on_step or (lambda _: None)
        texts = _write(own, prompts, say, samples, seed, sampling=sampling, max_new_tokens=max_new_tokens)
        acceptance = [_acceptance(own, prompts, text.tokens, sampling or Sampling()) for text in texts]
        least = _least_acceptance(own, sampling or Sampling())
        found[weight] = replace(measured, acceptance=acceptance, weights=(weight, 1 - weight), least=least)
    return found


def _write(
    ensemble: SpeculativeEnsemble,
    prompts: list[list[int]],
    say: Callable[[str], None],
    samples: int,
    seed: int,
    **settings: Any,
) -> list[Generation]:
    """Some texts, none of which ends early."""
    if isinstance(ensemble.ensemble, DenseTarget):
        kind = type(ensemble.ensemble).__name__
        raise ValueError(f"ensemble: expected a mixture or a contrast to plan for, got {kind}")
    texts = []
    for sample in range(samples):
        say(f"writing text {sample + 1} of {samples}")
        texts.append(
            ensemble.generate(
                MemberPrompts(prompts),
                seed=derived_seed(seed, 0, sample),
                stop_tokens=(),
                generation_config="none",
                **settings,
            )
        )
        if texts[-1].interrupted:
            raise KeyboardInterrupt
    return texts


def _weights(ensemble: SpeculativeEnsemble, num_members: int) -> tuple[float, ...]:
    weights = getattr(ensemble.ensemble, "weights", None)
    return (1.0,) * num_members if weights is None else tuple(map(float, weights))


def _least_acceptance(ensemble: SpeculativeEnsemble, sampling: Sampling) -> tuple[float, ...] | None:
    """Of each member as the drafter, for any text; None for ensembles and sampling that the theorem is not about."""
    own = ensemble.ensemble
    if not isinstance(own, Mixture) or sampling.greedy or (sampling.filters and own.filter == "mixture"):
        return None
    return tuple(least_acceptance(float(weight)) for weight in own.weights)


@torch.inference_mode()
def _acceptance(
    ensemble: SpeculativeEnsemble, prompts: list[list[int]], tokens: list[int], sampling: Sampling
) -> list[list[float]]:
    """Of each member the chance that its draft is accepted, at every position of a text."""
    indices = range(len(prompts))
    readers = [_reader(ensemble.models[index], prompts, (index,)) for index in indices]
    with running(ensemble.models):
        logits = [read(reader, tokens[:-1], len(tokens))[0][None] for reader in readers]  # [1, tokens, vocab] each
    device = logits[0].device
    everyone = [rows.to(device) for rows in logits]
    assert not isinstance(ensemble.ensemble, DenseTarget)  # `_write` refuses them
    target = target_logprobs(everyone, ensemble=ensemble.ensemble, sampling=sampling).exp()[0]
    found = []
    for index in indices:
        own = target_logprobs([everyone[index]], sampling=sampling).exp()[0]
        width = min(own.shape[1], target.shape[1])
        found.append(torch.minimum(own[:, :width], target[:, :width]).sum(dim=1).clamp(max=1.0).tolist())
    return found


def _reader(engine: Engine, prompts: list[list[int]], indices: tuple[int, ...]) -> Reader:
    return open_reader(engine, [prompts[index] for index in indices], indices, Statistics.of(len(prompts)))


@torch.inference_mode()
def _costs(
    models: Sequence[Engine],
    prompts: list[list[int]],
    tokens: list[int],
    together: Sequence[tuple[int, ...]],
    repeats: int,
) -> tuple[dict[tuple[int, ...], GroupCost], int]:
    """The cost of each group's forwards after a text, which is repeated where it is too short; bytes of a row."""
    text = (tokens * (1 + (ALREADY_READ + max(COUNTS)) // len(tokens)))[: ALREADY_READ + max(COUNTS)]
    readers = {indices: _reader(models[indices[0]], prompts, indices) for indices in together}
    prompt_seconds, row_bytes = {}, 0
    for indices, reader in readers.items():
        prompt_seconds[indices], logits = _timed(reader, [], 1)
        row_bytes = max(row_bytes, logits[0].nbytes)
    times: dict[tuple, dict[int, list[float]]] = {indices: {count: [] for count in COUNTS} for indices in together}
    for reader in readers.values():
        _timed(reader, text[:ALREADY_READ], ALREADY_READ)
    for _ in range(repeats):
        for count in COUNTS:
            for indices, reader in readers.items():
                times[indices][count].append(_timed(reader, text[: ALREADY_READ + count], count)[0])
                reader.roll_back(ALREADY_READ)
    costs = {
        indices: GroupCost(
            {count: statistics.median(seconds) for count, seconds in times[indices].items()}, prompt_seconds[indices]
        )
        for indices in together
    }
    return costs, row_bytes


def _timed(reader: Reader, sequence: list[int], rows: int) -> tuple[float, Tensor]:
    """Seconds of a read, and its logits [rows, vocab] of the first text."""
    started = time.perf_counter()
    logits: Tensor = read(reader, sequence, rows)[0]
    if logits.is_cuda:
        torch.cuda.synchronize(logits.device)
    return time.perf_counter() - started, logits
