"""A model of vLLM that is an ensemble: every member forwards the same rows, and vLLM manages the KV of all.

Members' logits are kept apart for verification, which tempers and filters them as the ensemble defines.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.compilation.backends import set_model_tag
from vllm.config import VllmConfig
from vllm.config.utils import replace
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model

from specens.adapters.vllm.ensemble_config import check_member, member_config, settings_of
from specens_kernels import target_logprobs
from specens_kernels.ensembles import Ensemble

MEMBER_PREFIX = "member"


class SpecensEnsemble(nn.Module):
    """Members, each built and loaded as vLLM does it alone, from the entry `specens` of the config."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        base = vllm_config.model_config
        self.settings = settings_of(base)
        self.load_config, self.vocab = vllm_config.load_config, base.get_vocab_size()
        self.configs = [member_config(member, base) for member in self.settings.members]
        for member, config in zip(self.settings.members, self.configs):
            check_member(member, config, base)
        self.members = nn.ModuleList(self._built(vllm_config, prefix, index) for index in range(len(self.configs)))
        self.vocabs = [config.get_vocab_size() for config in self.configs]
        self.hidden_sizes = [config.get_hidden_size() for config in self.configs]
        # What vLLM gets as the logits, and masks by grammars: a member that knows every token.
        self.carrier = self.vocabs.index(max(self.vocabs))
        self._rows: tuple[Tensor, ...] | None = None
        self.reporting = False  # whether logits are for reports on prompts, not to sample from

    def _built(self, vllm_config: VllmConfig, prefix: str, index: int) -> nn.Module:
        config = replace(vllm_config, model_config=self.configs[index], quant_config=None)
        # A name without a dot before its number: vLLM reads one number of a layer's name.
        name = f"{prefix}{MEMBER_PREFIX}{index}"
        with set_model_tag(name):
            return initialize_model(vllm_config=config, model_config=self.configs[index], prefix=name)

    def load_weights(self, _weights: Iterable[tuple[str, Tensor]]) -> None:
        """Each member's from its own folder; those of the ensemble's folder, if any, are not looked at."""
        for member, config in zip(self.members, self.configs):
            get_model_loader(self.load_config).load_weights(member, config)

    def process_weights_after_loading(self) -> None:
        """What vLLM asks of a model once its layers are ready."""
        for member in self.members:
            finish: Any = getattr(member, "process_weights_after_loading", None)
            if finish is not None:
                finish()

    def embed_input_ids(self, _input_ids: Tensor) -> Tensor:
        """Part of vLLM's interface: an ensemble has no embedding of its own."""
        raise ValueError("inputs_embeds: expected token ids with an ensemble, whose members embed them each in its way")

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [tokens, all members'], one member's after the other's."""
        if intermediate_tensors is not None or inputs_embeds is not None:
            raise ValueError("intermediate_tensors, inputs_embeds: expected none, an ensemble takes token ids")
        states = [
            member(self._known(input_ids, index), positions, None, None) for index, member in enumerate(self.members)
        ]
        return torch.cat(states, -1)

    def _known(self, input_ids: Tensor, index: int) -> Tensor:
        """The ids, but a member's last one for those outside its vocabulary (padding of another's that was drawn)."""
        smaller = self.vocabs[index] < self.vocab
        return input_ids.clamp(max=self.vocabs[index] - 1) if smaller else input_ids

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Logits [rows, vocab] of one member, which stand for all (see `take_rows`).

        While `reporting`: the ensemble's log-probabilities at temperature 1, by its default weights.
        """
        parts = hidden_states.split(self.hidden_sizes, -1)
        rows = tuple(self._member_logits(index, part.contiguous()) for index, part in enumerate(parts))
        if rows[0] is None:  # a rank that does not sample
            return None
        if self.reporting:
            return ensemble_logprobs(rows, self.settings.ensemble())
        self._rows = rows
        return rows[self.carrier]

    def _member_logits(self, index: int, hidden_states: Tensor) -> Any:
        member: Any = self.members[index]
        logits = member.compute_logits(hidden_states)
        missing = 0 if logits is None else self.vocab - logits.shape[-1]
        return nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits

    def take_rows(self, logits: Tensor, has_grammar: bool) -> tuple[Tensor, ...]:
        """The members' logits, each [rows, vocab], that `logits` stand for; once.

        has_grammar: vLLM masked the tokens that a grammar forbids in `logits`, and they are masked in all members.
        """
        rows, self._rows = self._rows, None
        if rows is None or rows[self.carrier].data_ptr() != logits.data_ptr() or rows[0].shape != logits.shape:
            raise RuntimeError("the logits to sample from are not those that the ensemble computed last")
        if has_grammar:
            forbidden = torch.isneginf(logits)
            for index, other in enumerate(rows):
                if index != self.carrier:
                    other.masked_fill_(forbidden, -torch.inf)
        return rows

    @staticmethod
    def get_model_state_cls() -> type:
        """The V2 model runner's hook."""
        from specens.adapters.vllm.v2_ensemble import EnsembleState

        return EnsembleState


def ensemble_logprobs(rows: tuple[Tensor, ...], ensemble: Ensemble) -> Tensor:
    """Log-probabilities float32 [rows, vocab] of the ensemble at temperature 1."""
    return target_logprobs(rows, ensemble=ensemble)
