"""Loads members that llama.cpp runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from specens.engines.llama_cpp.engine import LlamaCpp
from specens.engines.llama_cpp.library import library
from specens.engines.llama_cpp.model import ALL_LAYERS, GGUFModel
from specens.engines.llama_cpp.tokenizer import GGUFTokenizer
from specens.engines.loading import split_adapter
from specens.engines.transformers.load import resolve_model


class ModelLoader:
    """As of `specens.engines.loading.Loader`; members of one file share its weights, whatever their adapters.

    unused: the arguments that change nothing: a GGUF file is run as it is quantised.
    """

    unused = ("dtype", "revision", "model_kwargs")

    def __init__(
        self,
        dtype: str | torch.dtype | None,  # noqa: ARG002
        device: str | torch.device | None,
        revision: str | None,  # noqa: ARG002
        model_kwargs: Mapping[str, Any] | None,  # noqa: ARG002
    ) -> None:
        self._where: dict[str, int | None] = {}
        if device is not None:
            named = torch.device(device)
            self._where = {"gpu_layers": 0} if named.type == "cpu" else {"gpu_layers": ALL_LAYERS, "gpu": named.index}
        self._engines: dict[str, LlamaCpp] = {}
        self._models: dict[Path, GGUFModel] = {}

    def tokenizer(self, spec: str) -> GGUFTokenizer:
        """That of the file."""
        return self.engine(spec).tokenizer

    def engine(self, spec: str) -> LlamaCpp:
        """A loaded file, of MODEL or MODEL+ADAPTER: a .gguf file or package:NAME; a LoRA in one, or PEFT's folder."""
        if spec not in self._engines:
            library()  # which may be missing, before any file is
            base, adapter = split_adapter(spec)
            path = resolve_model(base).path
            if path.suffix != ".gguf":
                raise ValueError(f"model: expected a .gguf file or package:NAME for llama.cpp, got {base!r}")
            if path not in self._models:
                self._models[path] = GGUFModel(path, **self._where)
            self._engines[spec] = LlamaCpp(self._models[path], adapter)
        return self._engines[spec]
