"""Members by their specs: which engine runs a model, and its tokenizer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from specens.engines.llama_cpp.library import is_installed
from specens.engines.protocol import Engine
from specens.engines.transformers.causal_lm import CausalLM
from specens.engines.transformers.load import (
    DTYPE,
    PACKAGE_PREFIX,
    TRANSFORMERS_PREFIX,
    check_unused,
    load_model,
    load_tokenizer,
    pinned,
    resolve_model,
)

LLAMA_CPP_PREFIX = "llama_cpp:"


def is_for_llama_cpp(spec: str | os.PathLike[str]) -> bool:
    """Whether llama.cpp runs a model: one named so, and where llama-cpp-python is installed any GGUF file.

    Without it transformers runs a GGUF file, dequantised; "transformers:" before a spec asks for that.
    """
    text = os.fspath(spec)
    if text.startswith((LLAMA_CPP_PREFIX, TRANSFORMERS_PREFIX)):
        return text.startswith(LLAMA_CPP_PREFIX)
    base, _ = _split(text)
    return (base.startswith(PACKAGE_PREFIX) or base.endswith(".gguf")) and is_installed()


class Loader:
    """Loads members, and each file once: equal specs are one engine, and those of a GGUF file share its weights.

    dtype: of models that transformers runs, None is bfloat16. device: None is the GPU where there is one. revision: of
        names of the hub. Specs are those of `resolve_model`, also with "llama_cpp:" or "transformers:" before a GGUF
        file; an adapter for llama.cpp may be a .gguf file, too.
    """

    def __init__(
        self, dtype: str | torch.dtype | None, device: str | torch.device | None, revision: str | None = None
    ) -> None:
        self._dtype, self._device, self._revision = dtype, device, revision
        self._engines: dict[str, Engine] = {}
        self._weights: dict[Path, Any] = {}
        self._tokenizers: dict[str, Any] = {}

    def tokenizer(self, spec: str | os.PathLike[str]) -> Any:
        """The tokenizer of a model. Raises ValueError as `resolve_model`, and where its files cannot be read."""
        if is_for_llama_cpp(spec):
            return self.engine(spec).tokenizer
        own = pinned(spec, self._revision)
        if own not in self._tokenizers:
            self._tokenizers[own] = load_tokenizer(own, dtype=DTYPE if self._dtype is None else self._dtype)
        return self._tokenizers[own]

    def engine(self, spec: str | os.PathLike[str]) -> Engine:
        """A member, with its tokenizer. Raises ValueError as `tokenizer`, and for what its engine has no use for."""
        runs_by_llama_cpp = is_for_llama_cpp(spec)
        key = os.fspath(spec) if runs_by_llama_cpp else pinned(spec, self._revision)
        if key not in self._engines:
            self._engines[key] = self._load_gguf(key) if runs_by_llama_cpp else self._load_transformers(key)
        return self._engines[key]

    def check(self) -> None:
        """Raise ValueError for a dtype or revision that none of the models has a use for."""
        if all(not isinstance(engine, CausalLM) for engine in self._engines.values()):
            check_unused("GGUF files, which llama.cpp runs as they are", dtype=self._dtype, revision=self._revision)

    def _load_transformers(self, spec: str) -> Engine:
        dtype = DTYPE if self._dtype is None else self._dtype
        engine = CausalLM(load_model(spec, dtype=dtype, device=self._device))
        engine.tokenizer = self.tokenizer(spec)
        return engine

    def _load_gguf(self, spec: str) -> Engine:
        from specens.engines.llama_cpp.engine import LlamaCpp
        from specens.engines.llama_cpp.model import GGUFModel

        base, adapter = _split(spec.removeprefix(LLAMA_CPP_PREFIX))
        path = resolve_model(base).path
        if path.suffix != ".gguf":
            raise ValueError(f"model: expected a .gguf file or package:NAME after {LLAMA_CPP_PREFIX!r}, got {base!r}")
        if path not in self._weights:
            self._weights[path] = GGUFModel(path, gpu_layers=_gpu_layers(self._device))
        return LlamaCpp(self._weights[path], adapter)


def load_engine(
    spec: str | os.PathLike[str], dtype: str | torch.dtype | None = None, device: str | torch.device | None = None
) -> Engine:
    """One model with its tokenizer. The arguments are those of `Loader`, and so is what it raises."""
    loader = Loader(dtype, device)
    engine = loader.engine(spec)
    loader.check()
    return engine


def _split(text: str) -> tuple[str, str | None]:
    """A spec's model and adapter."""
    if Path(text).exists() or "+" not in text:
        return text, None
    base, _, adapter = text.rpartition("+")
    return base, adapter


def _gpu_layers(device: str | torch.device | None) -> int | None:
    """How many layers lie on the GPU, as of `GGUFModel`."""
    return None if device is None else 0 if torch.device(device).type == "cpu" else -1
