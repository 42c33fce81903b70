"""A member of an ensemble drafts: vLLM's drafter gets that module, with its KV, instead of a second copy."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from vllm.config import ModelConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from specens.adapters.vllm.ensemble_model import MEMBER_PREFIX, SpecensEnsemble

SHARED = "specens_shared"  # left on vLLM's drafter: whether its module is a member


def drafter_index(model: SpecensEnsemble, draft: ModelConfig) -> int | None:
    """Which member the draft model is; None for one of its own."""
    known, wanted = [_identity(config) for config in model.configs], _identity(draft)
    return known.index(wanted) if wanted in known else None


def _identity(config: ModelConfig) -> tuple[str, str | None]:
    local = os.path.exists(config.model)
    return (os.path.realpath(config.model), None) if local else (config.model, config.revision)


def sharing_a_member(drafter: Any, loads: str, layer_names: str, original: Callable) -> Callable:
    """Make a drafter's `load_model`, under which its method `loads` gives the member that its draft model is.

    drafter: the class that runs whole models. layer_names: where it keeps the names of its attention layers, which the
    ensemble has made before it.
    """

    def load_model(self: Any, target_model: Any) -> None:
        index = None
        if isinstance(target_model, SpecensEnsemble) and isinstance(self, drafter):
            index = drafter_index(target_model, self.draft_model_config)
        setattr(self, SHARED, index is not None)
        if index is None:
            original(self, target_model)
            return
        setattr(self, loads, lambda *_: target_model.members[index])
        self._draft_vllm_config = self.vllm_config  # the member was built by it
        original(self, target_model)
        layers = get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase)
        setattr(self, layer_names, {name for name in layers if name.startswith(f"{MEMBER_PREFIX}{index}.")})

    return load_model
