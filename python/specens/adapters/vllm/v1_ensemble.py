"""An ensemble in the V1 model runner: its members' logits, the weights of requests, and reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.worker import gpu_model_runner

from specens.adapters.vllm.arguments import Target
from specens.adapters.vllm.ensemble_config import is_ensemble, settings_of
from specens.adapters.vllm.ensemble_model import SpecensEnsemble
from specens.adapters.vllm.ensemble_settings import EnsembleSettings
from specens.adapters.vllm.replacements import Replacement


def replacements() -> list[Replacement]:
    """What an ensemble needs besides; for other models vLLM's own functions run."""
    runner = gpu_model_runner.GPUModelRunner
    prompts = ("self", "hidden_states", "num_scheduled_tokens")
    verifies = ("self", "model_config", "speculative_config", "structured_outputs_config", "tokenizer")
    return [
        Replacement(runner, "_get_prompt_logprobs_dict", prompts, _reporting_the_ensemble),
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
        model: SpecensEnsemble = self.get_model()
        model.reporting = True
        try:
            return original(self, hidden_states, num_scheduled_tokens)
        finally:
            model.reporting = False

    return prompt_logprobs


def _checking_weights(original: Callable) -> Callable:
    def verify(self: Any, model_config: Any, *others: Any, **named: Any) -> None:
        """What an ensemble cannot do for a request is refused where the request comes in."""
        if is_ensemble(model_config):
            try:
                check_request(settings_of(model_config), self)
            except ValueError as error:  # the server answers 400 to errors of vLLM's own class alone
                raise VLLMValidationError(str(error)) from error
        original(self, model_config, *others, **named)

    return verify


def check_request(settings: EnsembleSettings, params: SamplingParams) -> None:
    """Raise ValueError naming what a request asks for and does not get."""
    weights = settings.weights_of(params.extra_args)
    if params.prompt_logprobs is not None and weights != settings.weights:
        raise ValueError("prompt_logprobs: expected none of a request with weights of its own")
    if getattr(params, "logprob_token_ids", None):
        raise ValueError("logprob_token_ids: expected none with an ensemble, use logprobs")
