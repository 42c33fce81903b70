"""The settings of several requests as the arguments of one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specens.decoding.request import OUTSIDE, Request
from specens.targets import DenseTarget
from specens_kernels import Contrastive, LogitMixture, Mixture, Processing, Sampling

PADDING = -1  # in tables of tokens


def alike(requests: Sequence[Request]) -> list[list[Request]]:
    """The requests whose settings go into one call, together: they differ in numbers only."""
    if len(requests) < 2:
        return [list(requests)] if requests else []
    kinds = [_kind(request) for request in requests]
    if kinds.count(kinds[0]) == len(kinds):
        return [list(requests)]
    of_kinds = list(zip(kinds, requests, strict=True))
    return [[request for kind, request in of_kinds if kind == own] for own in dict.fromkeys(kinds)]


def sampling_of(requests: Sequence[Request], device: torch.device) -> Sampling:
    """The sampling parameters of the requests, which are alike; drafts are drawn with them too."""
    return _common([request.task.sampling for request in requests], _merge_sampling, device)


def edits(requests: Sequence[Request], device: torch.device, indices: Sequence[int] | None = None) -> dict[str, Any]:
    """The processing of the requests, which are alike, after their settled text, or at an index of each."""
    if not _is_processed(requests[0]):
        return {}
    if indices is not None and len(requests) > 1 and all(request is requests[0] for request in requests):
        return {"processing": _processing_at(requests[0], indices, device)}
    positions = [request.num_settled for request in requests] if indices is None else indices
    texts = [request.text_before(index) for request, index in zip(requests, positions, strict=True)]
    return {"processing": _merge_processing(requests, texts, device)}


def target_arguments(requests: Sequence[Request], logits: list[Tensor], counts: Sequence[int]) -> dict[str, Any]:
    """member_logits, ensemble and sampling of the requests, which are alike.

    logits: of the members that count: [..., vocab], `counts` rows in all of each request.
    """
    device = logits[0].device
    tasks = [request.task for request in requests]
    sampling = sampling_of(requests, device)
    target = tasks[0].ensemble
    if not isinstance(target, DenseTarget):
        ensemble = _common([request.target for request in requests], _merge_ensembles, device)
        return {"member_logits": logits, "ensemble": ensemble, "sampling": sampling}
    temperatures = [float(task.sampling.temperature) for task in tasks]
    of_rows = [value or 1.0 for value, count in zip(temperatures, counts, strict=True) for _ in range(count)]
    shape = logits[0].shape[:-1]
    combined = target.combine([rows.flatten(0, -2).float() for rows in logits], torch.tensor(of_rows, device=device))
    done = torch.tensor([float(value > 0) for value in temperatures], device=device)
    return {
        "member_logits": [combined.unflatten(0, shape)],
        "ensemble": None,
        "sampling": replace(sampling, temperature=done),
    }


def with_drafters(arguments: dict[str, Any], logits: list[Tensor]) -> dict[str, Any]:
    """The same with members of weight 0, which only draft."""
    if not logits:
        return arguments
    own, none = arguments["ensemble"], (0.0,) * len(logits)
    if own is None:
        ensemble: Any = Mixture((1.0, *none))
    elif isinstance(own, Contrastive):
        ensemble = LogitMixture((*own.weights, *none), own.plausibility)
    elif isinstance(own.weights, Tensor):
        ensemble = replace(own, weights=torch.nn.functional.pad(own.weights, (0, len(none))))
    else:
        ensemble = replace(own, weights=(*own.weights, *none))
    return arguments | {"member_logits": [*arguments["member_logits"], *logits], "ensemble": ensemble}


def row_masks(requests: Sequence[Request], indices: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """The bit masks [indices, words] of each request at these indices; empty where the requests have none."""
    if requests[0].task.constraint is None:
        return []
    return [
        torch.stack([request.mask(index) for index in own]).to(device)
        for request, own in zip(requests, indices, strict=True)
    ]


def _kind(request: Request) -> tuple:
    return request.kind, _is_processed(request), request.rows[OUTSIDE].end > 0, request.drafts.siblings


def _common(values: list[Any], merge: Callable[[list[Any], torch.device], Any], device: torch.device) -> Any:
    """The one value that all share, or all of them in one."""
    return values[0] if values.count(values[0]) == len(values) else merge(values, device)


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


def _merge_ensembles(values: list[Any], device: torch.device) -> Any:
    weights = torch.tensor([value.weights for value in values], dtype=torch.float64, device=device)
    return replace(values[0], weights=weights)


def is_edited(request: Request) -> bool:
    """Whether anything is done to its logits before a token is drawn."""
    return request.task.constraint is not None or _is_processed(request)


def _is_processed(request: Request) -> bool:
    return request.task.processing is not None or request.task.min_new_tokens > request.num_settled


def _merge_processing(requests: Sequence[Request], texts: list[list[int]], device: torch.device) -> Processing:
    """What is done to the logits of each request after its text, the generated tokens so far."""
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


def _processing_at(request: Request, indices: Sequence[int], device: torch.device) -> Processing:
    """The same of one request at several indices from its settled text on, which becomes a tensor once for all."""
    one = _merge_processing([request], [request.settled], device)
    drafts = [request.drafts_before(index) for index in indices]
    waiting = [max(request.task.min_new_tokens - request.num_settled - len(own), 0) for own in drafts]

    def rows(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(rows, value))
        return value.expand(len(indices), *value.shape[1:]).contiguous() if isinstance(value, Tensor) else value

    own = {field.name: rows(getattr(one, field.name)) for field in fields(one)}
    after = padded(drafts, PADDING, device)
    own |= {"min_tokens": torch.tensor(waiting, device=device)}
    return Processing(**own | {"output_tokens": torch.cat([own["output_tokens"], after], dim=1)})


def _merge_biases(own: list[Processing], device: torch.device) -> tuple[Tensor, Tensor] | None:
    biases = [processing.logit_bias for processing in own]
    if all(bias is None for bias in biases):
        return None
    tokens = [[] if bias is None else bias[0].flatten().tolist() for bias in biases]
    values = [[] if bias is None else bias[1].flatten().tolist() for bias in biases]
    return padded(tokens, PADDING, device), padded(values, 0.0, device)


def padded(lists: Sequence[Sequence[int | float]], value: int | float, device: torch.device) -> Tensor:
    """Lists of numbers as the rows of one tensor [lists, longest], by NumPy, which takes a third of torch's time."""
    most = max(map(len, lists))
    rows = [[*line, *[value] * (most - len(line))] for line in lists]
    return torch.from_numpy(np.array(rows, np.int64 if isinstance(value, int) else np.float32)).to(device)
