"""An ensemble in the V2 model runner of vLLM, by its hooks: the state of a model, and the samplers that it brings.

A member that drafts is the one thing that takes a replacement, of how the drafter gets its module.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from specens.adapters.vllm import arguments, v2
from specens.adapters.vllm.arguments import Target
from specens.adapters.vllm.ensemble_model import SpecensEnsemble, ensemble_logprobs
from specens.adapters.vllm.member_drafter import sharing_a_member
from specens.adapters.vllm.replacements import Replacement
from specens_kernels import sample

NEXT_TOKEN = 1  # the stream of the token that `verify_chain` draws


class EnsembleState(DefaultModelState):
    """Weights of requests, by slot, and the ensemble's samplers."""

    supports_prompt_embeds: ClassVar[bool] = False
    rule = "token"  # the plug-in sets it

    def __init__(self, vllm_config: Any, model: SpecensEnsemble, encoder_cache: Any, device: torch.device) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        self.keep_slots(model, self.max_num_reqs, device)

    def keep_slots(self, model: SpecensEnsemble, slots: int, device: torch.device) -> None:
        """Slots, each with the default weights and no grammar."""
        self.ensemble, self.settings = model, model.settings
        self.weights = torch.tensor(self.settings.weights).repeat(slots, 1)  # on the host
        self.weights_on_device = self.weights.to(device)
        self.own = np.zeros(slots, dtype=bool)
        self.has_grammar = np.zeros(slots, dtype=bool)
        self.staged = False

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        """vLLM's hook for a new request in a slot."""
        super().add_request(req_index, new_req_data)
        params = new_req_data.sampling_params
        weights = self.settings.weights_of(params.extra_args)
        self.weights[req_index] = torch.tensor(weights)
        self.own[req_index] = weights != self.settings.weights
        self.has_grammar[req_index] = params.structured_outputs is not None
        self.staged = True

    def apply_staged_writes(self) -> None:
        """vLLM's hook before a step."""
        super().apply_staged_writes()
        if self.staged:
            self.weights_on_device.copy_(self.weights)
            self.staged = False

    def custom_sampler(self, sampler: Sampler) -> tuple[Sampler, RejectionSampler | None]:
        """vLLM's hook for the samplers of steps without drafts and with drafts."""
        own = EnsembleSampler(sampler, self)
        speculative = self.vllm_config.speculative_config
        return own, None if speculative is None else EnsembleRejectionSampler(own, speculative, self.device, self)

    def prepare_inputs(self, *step: Any) -> dict[str, Any]:
        """vLLM's hook before a forward."""
        self.ensemble.reporting = False
        return super().prepare_inputs(*step)

    def prepare_dummy_inputs(self, *step: Any, **sizes: Any) -> dict[str, Any]:
        """vLLM's hook before a trial run."""
        self.ensemble.reporting = False
        return super().prepare_dummy_inputs(*step, **sizes)

    def members_of(self, logits: Tensor, slots: np.ndarray) -> tuple[Tensor, ...]:
        """The members' logits [rows, vocab] that `logits` stand for, of the requests in these slots.

        Whatever vLLM computes until the next step is for reports on prompts.
        """
        rows = self.ensemble.take_rows(logits, bool(self.has_grammar[slots].any()))
        self.ensemble.reporting = True
        return rows

    def ensemble_of(self, slots: Tensor, slots_on_host: np.ndarray) -> Any:
        """The ensemble of requests or rows with these slots, [n]; on the host, those that occur."""
        own = bool(self.own[slots_on_host].any())
        return self.settings.ensemble(self.weights_on_device[slots.long()] if own else None)


class EnsembleSampler(Sampler):
    """vLLM's sampler, drawing from an ensemble."""

    def __init__(self, sampler: Sampler, state: EnsembleState) -> None:
        self.__dict__.update(vars(sampler))
        self.state = state
        self.members: tuple[Tensor, ...] = ()

    def __call__(self, logits: Tensor, input_batch: Any) -> Any:
        """A step without drafts; logits: [requests, vocab]."""
        slots, slots_on_host = input_batch.expanded_idx_mapping, input_batch.idx_mapping_np
        self.members = self.state.members_of(logits, slots_on_host)
        if self.get_logprobs_dims(slots_on_host) is not None:
            logits = ensemble_logprobs(self.members, self.state.ensemble_of(slots, slots_on_host))
        return super().__call__(logits, input_batch)

    def sample(self, logits: Tensor, *context: Any, return_logprobs: bool = False) -> tuple[Tensor, Tensor]:
        """Tokens int64 [rows], and logits to report from."""
        make_context, processed_modes = v2.of_vllm()
        named = dict(zip(v2.CONTEXT, context, strict=True))
        slots, slots_on_host = named["expanded_idx_mapping"], named["idx_mapping_np"]
        rows = tuple(v2.edited_by_vllm(self, own, slots_on_host, lambda: make_context(**named)) for own in self.members)
        target = Target(rows, self.state.ensemble_of(slots, slots_on_host))
        by_gumbel, seeds = self.state.rule == "gumbel", self.sampling_states.seeds.gpu[slots]
        draw = sample(
            target.members,
            ensemble=target.ensemble,
            sampling=v2.sampling_of(self.sampling_states, slots, slots_on_host, logits.shape[1]),
            seeds=seeds if by_gumbel else seeds ^ v2.SEED_SALT,
            positions=named["pos"].long() + 1,
            stream=None if by_gumbel else NEXT_TOKEN,
            method="gumbel" if by_gumbel else "inverse_cdf",
        )
        wanted = v2.reports_processed(self, processed_modes) and (return_logprobs or self.return_sampling_mask)
        return arguments.some_token(draw.tokens), v2.processed_logprobs(self, target, named) if wanted else logits


class EnsembleRejectionSampler(RejectionSampler):
    """vLLM's rejection sampler, verifying against an ensemble."""

    def __init__(self, sampler: EnsembleSampler, speculative: Any, device: torch.device, state: EnsembleState) -> None:
        super().__init__(sampler, speculative, device)
        if self.synthetic_conditional_rates is not None:
            raise ValueError("rejection_sample_method: expected standard or block with an ensemble, got 'synthetic'")
        self.rule = arguments.chain_rule(state.rule, speculative.rejection_sample_method)
        self.state = state
        self.given, self.members = torch.empty(0), tuple[Tensor, ...]()

    def __call__(self, logits: Tensor, input_batch: Any, *drafts: Any) -> Any:
        """A step with drafts; logits: [rows, vocab], packed."""
        slots_on_host = input_batch.idx_mapping_np
        self.members = self.state.members_of(logits, slots_on_host)
        if self.sampler.get_logprobs_dims(slots_on_host, include_token_ids=False) is not None:
            ensemble = self.state.ensemble_of(input_batch.expanded_idx_mapping, slots_on_host)
            logits = ensemble_logprobs(self.members, ensemble)
        self.given = logits
        return super().__call__(logits, input_batch, *drafts)

    def _verify(self, logits: Tensor, *call: Any) -> tuple[Tensor, Tensor, Tensor]:
        """A chunk of the requests of a step; logits: [rows, vocab], those rows of what vLLM was given."""
        first = (logits.storage_offset() - self.given.storage_offset()) // self.given.stride(0)
        rows = tuple(own[first : first + logits.shape[0]] for own in self.members)
        slots, slots_on_host = call[4], call[5]  # idx_mapping, idx_mapping_np
        target = Target(rows, self.state.ensemble_of(slots, slots_on_host))
        make_context, processed_modes = v2.of_vllm()
        return partial(v2.verify, target=target)(self, make_context, processed_modes, logits, *call)


def replacements(rule: str) -> list[Replacement]:
    """How a drafter gets its module, where that is a member; rule: "token" or "gumbel", which the samplers follow."""
    EnsembleState.rule = rule
    shares = partial(sharing_a_member, StandaloneARSpeculator, "load_draft_model", "draft_attn_layer_names")
    return [Replacement(DraftModelSpeculator, "load_model", ("self", "target_model"), shares)]
