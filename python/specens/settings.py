"""The settings of several requests as the arguments of one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specens.request import Ensemble, Request
from specens_kernels import Contrastive, Mixture, Processing, Sampling

PADDING = -1  # in tables of tokens


def alike(requests: Sequence[Request]) -> list[list[Request]]:
    """The requests whose settings go into one call, together: they differ in numbers only."""
    groups: dict[tuple, list[Request]] = {}
    for request in requests:
        groups.setdefault(_kind(request), []).append(request)
    return list(groups.values())


def batch_settings(requests: Sequence[Request], device: torch.device, *, lone_member: bool = False) -> dict[str, Any]:
    """sampling and processing of the requests, which are alike, at the first position that is not settled.

    lone_member: of the distribution that one member drafts from, behind the drafts so far.
    """
    tasks = [request.task for request in requests]
    arguments: dict[str, Any] = {"sampling": _common([task.sampling for task in tasks], _merge_sampling, device)}
    if _edits(requests[0]):
        texts = [request.sequence if lone_member else request.sequence[: request.num_settled] for request in requests]
        arguments["processing"] = _merge_processing(requests, texts, device)
    return arguments


def target_of(requests: Sequence[Request], places: Sequence[int], device: torch.device) -> Ensemble | None:
    """The ensemble of the requests, which are alike, for the logits of these places; the others have no weight."""
    ensembles = [_restricted(request.task.ensemble, places) for request in requests]
    return _common(ensembles, _merge_ensembles, device)


def _restricted(ensemble: Ensemble | None, places: Sequence[int]) -> Ensemble | None:
    if ensemble is None or isinstance(ensemble, Contrastive):
        return ensemble
    weights = tuple(float(ensemble.weights[place]) for place in places)
    alone = len(weights) == 1 and (isinstance(ensemble, Mixture) or weights == (1.0,))
    return None if alone else replace(ensemble, weights=weights)


def row_masks(requests: Sequence[Request], positions: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """The bit masks [positions, words] of each request at these positions; empty where the requests have none."""
    if requests[0].task.constraint is None:
        return []
    return [
        torch.stack([request.mask(position) for position in own]).to(device)
        for request, own in zip(requests, positions, strict=True)
    ]


def _kind(request: Request) -> tuple:
    task = request.task
    sampling, ensemble = task.sampling, task.ensemble
    mixing = [getattr(ensemble, name, None) for name in ("filter", "plausibility", "amateur_weight")]
    edits = (_edits(request), task.constraint is not None)
    outside = request.drafts.rows.end > 0
    return type(ensemble), *mixing, request.counted, sampling.filter_order, task.logprobs, *edits, outside


def _common(values: list[Any], merge: Callable[[list[Any], torch.device], Any], device: torch.device) -> Any:
    """The one value that all share, or all of them in one."""
    first = values[0]
    return first if all(value == first for value in values) else merge(values, device)


def _merge_sampling(values: list[Sampling], device: torch.device) -> Sampling:
    def column(name: str, off: float, dtype: torch.dtype = torch.float64) -> Tensor | None:
        numbers = [getattr(value, name) for value in values]
        if all(number is None for number in numbers):
            return None
        return torch.tensor([off if number is None else float(number) for number in numbers], device=device).to(dtype)

    temperature = column("temperature", 1.0)
    assert temperature is not None
    filters = {"top_k": column("top_k", 0, torch.int64), "top_p": column("top_p", 1.0), "min_p": column("min_p", 0.0)}
    return Sampling(temperature, **filters, filter_order=values[0].filter_order)


def _merge_ensembles(values: list[Any], device: torch.device) -> Ensemble:
    weights = torch.tensor([value.weights for value in values], dtype=torch.float64, device=device)
    return replace(values[0], weights=weights)


def _edits(request: Request) -> bool:
    return request.task.processing is not None or request.task.min_new_tokens > request.num_settled


def _merge_processing(requests: Sequence[Request], texts: list[list[int]], device: torch.device) -> Processing:
    """What is done to the logits of each request behind its text, the generated tokens so far."""
    own = [request.task.processing or Processing() for request in requests]
    penalties = {
        name: torch.tensor([float(getattr(processing, name)) for processing in own], device=device)
        for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")
    }
    tasks = [request.task for request in requests]
    waiting = [max(task.min_new_tokens - len(text), 0) for task, text in zip(tasks, texts, strict=True)]
    return Processing(
        **penalties,
        logit_bias=_merge_biases(own, device),
        min_tokens=torch.tensor(waiting, device=device),
        end_tokens=padded([sorted(task.stop_tokens) for task in tasks], PADDING, device),
        prompt_tokens=padded([task.prompts[0] for task in tasks], PADDING, device),
        output_tokens=padded(texts, PADDING, device),
    )


def _merge_biases(own: list[Processing], device: torch.device) -> tuple[Tensor, Tensor] | None:
    biases = [processing.logit_bias for processing in own]
    if all(bias is None for bias in biases):
        return None
    tokens = [[] if bias is None else bias[0].flatten().tolist() for bias in biases]
    values = [[] if bias is None else bias[1].flatten().tolist() for bias in biases]
    return padded(tokens, PADDING, device), padded(values, 0.0, device)


def padded(lists: Sequence[Sequence[int | float]], value: int | float, device: torch.device) -> Tensor:
    """Lists of numbers as the rows of one tensor [lists, longest]."""
    most = max(map(len, lists))
    dtype = torch.int64 if isinstance(value, int) else torch.float32
    return torch.tensor([[*line, *[value] * (most - len(line))] for line in lists], dtype=dtype, device=device)
