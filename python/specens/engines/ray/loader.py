"""Members by specs in actors: each in one of its own, with the engine that the rest of the spec names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from specens.engines.loading import Loader
from specens.engines.ray.engine import RayEngine, actors_with, options_unless_given


class ModelLoader:
    """As of `specens.engines.loading.Loader`; equal specs are actors of their own. Tokenizers are loaded here."""

    unused: tuple[str, ...] = ()

    def __init__(
        self,
        dtype: str | torch.dtype | None,
        device: str | torch.device | None,
        revision: str | None,
        model_kwargs: Mapping[str, Any] | None,
        ray_options: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        self._options = iter(ray_options or ())
        self._here = Loader(dtype, device, revision, model_kwargs=model_kwargs)
        self._given: dict[str, Any] = {
            "dtype": dtype,
            "device": None if device is None else str(device),
            "revision": revision,
            "model_kwargs": model_kwargs,
        }

    def tokenizer(self, spec: str) -> Any:
        return self._here.tokenizer(spec)

    def engine(self, spec: str) -> RayEngine:
        return RayEngine(spec, options=next(self._options), **self._given)


def options_of(
    count: int, given: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None, device: str | torch.device | None
) -> list[Mapping[str, Any]]:
    """Ray's options of each of so many actors, see `specens.engines.loading.options_of_actors`."""
    if given is None:
        return [options_unless_given(count, device)] * count
    options: list[Any] = list(given) if isinstance(given, list | tuple) else [given] * count
    if len(options) != count:
        raise ValueError(f"ray_options: expected one for each of {count} specs with ray: before them, got {given!r}")
    for own in options:
        actors_with(own, "ray_options")
    return options
