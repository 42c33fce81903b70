"""Kernels compiled before they are needed."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from specens_kernels.triton_release import import_triton


def warmup(*calls: Callable[[], Any], workers: int | None = None) -> int:
    """Compile and load the Triton kernels that calls launch, in parallel, and launch none.

    calls: functions without arguments that call operations of this package on CUDA tensors with the settings, dtypes,
    vocabularies, strides and draft lengths to come; the batch may be small. What operations return in them is not
    written. workers: so many threads, by default as there are processors. Triton keeps what it has compiled on disk, so
    that a later process only loads it.

    A CUDA graph's capture can neither compile nor load a kernel, so what it captures is warmed up before:
    `warmup(step)`, or one call of the step itself.

    Returns how many kernels were not there before. Raises RuntimeError where Triton cannot be used.
    """
    if (reason := import_triton()[0]) is not None:
        raise RuntimeError(f"warmup: {reason}")
    launches: Any = importlib.import_module("specens_kernels.parts.launches")  # it needs Triton
    collected: dict[Hashable, Any] = {}
    launches.ACTIVITY.collected = collected
    try:
        for call in calls:
            call()
    finally:
        launches.ACTIVITY.collected = None
    missing = {key: launch for key, launch in collected.items() if key not in launches.COMPILED}

    def compile_launch(launch: Any) -> Any:
        with torch.cuda.device_of(_first_tensor(launch.arguments.values())):
            return launches.compile_launch(launch, start=False)

    for launch in missing.values():
        launch.kernel.cache_key  # noqa: B018 -- the hash of its source, computed once
    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        for (key, launch), compiled in zip(missing.items(), pool.map(compile_launch, missing.values()), strict=True):
            with torch.cuda.device_of(_first_tensor(launch.arguments.values())):
                compiled.run  # noqa: B018 -- loads it
            launches.COMPILED[key] = compiled
    return len(missing)


def _first_tensor(values: Iterable[Any]) -> Any:
    """That of arguments, which may be tuples of others."""
    for value in values:
        found = value if isinstance(value, Tensor) else _first_tensor(value) if isinstance(value, tuple) else None
        if found is not None:
            return found
    return None
