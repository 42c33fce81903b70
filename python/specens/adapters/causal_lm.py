"""A Hugging Face causal language model behind the few operations that the driver needs."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel


class CausalLM:
    """One loaded model: forward on a cache, and the facts about it that a member asks for.

    model: a causal LM of transformers, or one wrapped by PEFT; it is put into eval mode.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.eval()
        names = inspect.signature(self._base.forward).parameters
        cache_names = [name for name in ("cache", "past_key_values") if name in names]
        if not cache_names:
            raise ValueError(f"members: expected a model with a key-value cache, got {type(self._base).__name__}")
        self._cache_name = cache_names[0]
        self._slices_logits = "logits_to_keep" in names

    @property
    def _base(self) -> PreTrainedModel:
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    @property
    def device(self) -> torch.device:
        """Where token ids go in."""
        return self._base.get_input_embeddings().weight.device

    @property
    def num_embeddings(self) -> int:
        """Token ids below this one can be fed."""
        return self._base.get_input_embeddings().weight.shape[0]

    @property
    def max_positions(self) -> int | None:
        """The longest sequence the model was built for, or None where its configuration does not say."""
        return getattr(self._base.config.get_text_config(decoder=True), "max_position_embeddings", None)

    @property
    def end_of_sequence(self) -> set[int]:
        """The ids that end a text, by the model's generation settings."""
        return as_ids(getattr(self._base.generation_config or self._base.config, "eos_token_id", None))

    def new_cache(self) -> Any:
        """An empty cache of the class that the model's layers need."""
        return DynamicCache(config=self._base.config)

    def weights_key(self) -> tuple:
        """Equal for two models exactly if they compute the same function from the same memory."""
        storages = tuple((weight.data_ptr(), weight.shape, weight.stride()) for weight in self.model.parameters())
        return type(self._base), str(self._base.config.to_dict()), storages

    def forward(self, input_ids: Tensor, cache: Any, rows: int, **padding: Tensor) -> Tensor:
        """Feed input_ids [batch, new] behind the cache; logits [batch, rows, vocab] of the last `rows` positions.

        padding: attention_mask and position_ids of a left-padded batch.
        """
        arguments = {self._cache_name: cache, **padding}
        if self._slices_logits:
            arguments["logits_to_keep"] = rows
        output = self.model(input_ids=input_ids, use_cache=True, **arguments)
        return output.logits if self._slices_logits else output.logits[:, -rows:]


def as_ids(setting: int | list[int] | None) -> set[int]:
    """An end-of-sequence setting, which may be one id, several or none, as a set."""
    if setting is None:
        return set()
    return {setting} if isinstance(setting, int) else set(setting)
