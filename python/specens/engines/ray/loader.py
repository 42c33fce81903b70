"""Members by specs in actors: each in one of its own, with the engine that the rest of the spec names."""

from __future__ import annotations

from typing import Any

import torch

from specens.engines.loading import Loader
from specens.engines.ray.engine import RayEngine


class ModelLoader:
    """As of `specens.engines.loading.Loader`; equal specs are actors of their own. Tokenizers are loaded here."""

    unused: tuple[str, ...] = ()

    def __init__(
        self, dtype: str | torch.dtype | None, device: str | torch.device | None, revision: str | None
    ) -> None:
        self._here = Loader(dtype, device, revision)
        self._given: dict[str, Any] = {
            "dtype": dtype,
            "device": None if device is None else str(device),
            "revision": revision,
        }

    def tokenizer(self, spec: str) -> Any:
        return self._here.tokenizer(spec)

    def engine(self, spec: str) -> RayEngine:
        return RayEngine(spec, **self._given)
