"""An ensemble in the V1 model runner: its members' logits and requests' weights, a member as the drafter, reports."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.config import ModelConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.worker import gpu_model_runner

from specens.adapters.vllm.ensemble_config import is_ensemble, settings_of
from specens.adapters.vllm.ensemble_model import MEMBER_PREFIX, SpecensEnsemble
from specens.adapters.vllm.ensemble_settings import EnsembleSettings
from specens.adapters.vllm.replacements import Replacement
from specens.adapters.vllm.v1_edits import Target


def replacements() -> list[Replacement]:
    """What an ensemble needs besides; for other models vLLM's own functions run."""
    runner = gpu_model_runner.GPUModelRunner
    prompts = ("self", "hidden_states", "num_scheduled_tokens")
    verifies = ("self", "model_config", "speculative_config", "structured_outputs_config", "tokenizer")
    return [
        Replacement(runner, "_get_prompt_logprobs_dict", prompts, _reporting_the_ensemble),
        Replacement(SpecDecodeBaseProposer, "load_model", ("self", "target_model"), _sharing_a_member),
        Replacement(SamplingParams, "verify", verifies, _checking_weights),
    ]


def target_of(runner: Any, logits: Tensor) -> Target:
    """The members' logits that `logits` stand for, and the ensemble of the batch."""
    model: SpecensEnsemble = runner.get_model()
    asked = [runner.requests[request].sampling_params for request in runner.input_batch.req_ids]
    rows = model.take_rows(logits, any(params.structured_outputs is not None for params in asked))
    return Target(rows, ensemble_of(model.settings, asked, logits.device))


def ensemble_of(settings: EnsembleSettings, asked: list[SamplingParams], device: torch.device) -> Any:
    """The ensemble of requests, with a row of weights each where one of them has its own."""
    weights = [settings.weights_of(params.extra_args) for params in asked]
    if all(own == settings.weights for own in weights):
        return settings.ensemble()
    return settings.ensemble(torch.tensor(weights, dtype=torch.float32).to(device, non_blocking=True))


def _reporting_the_ensemble(original: Callable) -> Callable:
    def prompt_logprobs(self: Any, hidden_states: Tensor, num_scheduled_tokens: dict[str, int]) -> dict[str, Any]:
        if not is_ensemble(self.model_config):
            return original(self, hidden_states, num_scheduled_tokens)
        with self.get_model().reporting():
            return original(self, hidden_states, num_scheduled_tokens)

    return prompt_logprobs


def _sharing_a_member(original: Callable) -> Callable:
    def load_model(self: Any, target_model: Any) -> None:
        """A draft model that is a member as well is that module, with its KV."""
        place = None
        if isinstance(target_model, SpecensEnsemble) and isinstance(self, DraftModelProposer):
            place = place_of_drafter(target_model, self.draft_model_config)
        if place is None:
            original(self, target_model)
            return
        self.model = target_model.members[place]
        layers = get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase)
        self._draft_attn_layer_names = {name for name in layers if name.startswith(f"{MEMBER_PREFIX}{place}.")}

    return load_model


def place_of_drafter(model: SpecensEnsemble, draft: ModelConfig) -> int | None:
    """Which member the draft model is; None for one of its own."""
    known, wanted = [_identity(config) for config in model.configs], _identity(draft)
    return known.index(wanted) if wanted in known else None


def _identity(config: ModelConfig) -> tuple[str, str | None]:
    local = os.path.exists(config.model)
    return (os.path.realpath(config.model), None) if local else (config.model, config.revision)


def _checking_weights(original: Callable) -> Callable:
    def verify(self: Any, model_config: Any, *others: Any, **named: Any) -> None:
        """What an ensemble cannot do for a request is refused where the request comes in."""
        if is_ensemble(model_config):
            check_request(settings_of(model_config), self)
        original(self, model_config, *others, **named)

    return verify


def check_request(settings: EnsembleSettings, params: SamplingParams) -> None:
    """Raise ValueError naming what a request asks for and does not get."""
    weights = settings.weights_of(params.extra_args)
    if params.prompt_logprobs is not None and weights != settings.weights:
        raise ValueError("prompt_logprobs: expected none of a request with weights of its own")
    if getattr(params, "logprob_token_ids", None):
        raise ValueError("logprob_token_ids: expected none with an ensemble, use logprobs")
