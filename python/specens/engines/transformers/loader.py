"""Loads members that transformers runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from specens.engines.transformers.causal_lm import CausalLM
from specens.engines.transformers.load import DTYPE, check_model_kwargs, load_model, load_tokenizer, pinned


class ModelLoader:
    """As of `specens.engines.loading.Loader`; unused: the arguments that change nothing."""

    unused: tuple[str, ...] = ()

    def __init__(
        self,
        dtype: str | torch.dtype | None,
        device: str | torch.device | None,
        revision: str | None,
        model_kwargs: Mapping[str, Any] | None,
    ) -> None:
        self._dtype, self._device, self._revision = DTYPE if dtype is None else dtype, device, revision
        self._model_kwargs = check_model_kwargs(model_kwargs, device)
        self._engines: dict[str, CausalLM] = {}
        self._tokenizers: dict[str, Any] = {}
        self._commits: dict[str, str] = {}

    def tokenizer(self, spec: str) -> Any:
        """Of a spec of `resolve_model`."""
        own = self._pinned(spec)
        if own not in self._tokenizers:
            self._tokenizers[own] = load_tokenizer(
                own, dtype=self._dtype, trust_remote_code=self._model_kwargs["trust_remote_code"]
            )
        return self._tokenizers[own]

    def engine(self, spec: str) -> CausalLM:
        """A loaded model."""
        own = self._pinned(spec)
        if own not in self._engines:
            given: dict[str, Any] = {"dtype": self._dtype, "device": self._device, "model_kwargs": self._model_kwargs}
            engine = CausalLM(load_model(own, **given))
            engine.tokenizer = self.tokenizer(spec)
            self._engines[own] = engine
        return self._engines[own]

    def _pinned(self, spec: str) -> str:
        """The spec of one commit, looked up once, so that a tokenizer and its model are of the same."""
        if spec not in self._commits:
            self._commits[spec] = pinned(spec, self._revision)
        return self._commits[spec]
