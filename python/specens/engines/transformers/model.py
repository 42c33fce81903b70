"""A Hugging Face causal language model: its forwards on a cache, and the facts about it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationMixin, PreTrainedModel

from specens.engines.transformers import rope
from specens.engines.transformers.identity import active_adapters, input_device, same_function, unwrapped, with_adapters

MASKED_ATTENTION = ("sdpa", "eager")


class Model:
    """One loaded model: forward on a cache, and the facts about it that an engine has.

    model: a causal LM of transformers, or one compiled by torch.compile or wrapped by PEFT; generations put it into
        eval mode for their time. The adapters that are active now are so in each of its forwards.
    make_cache: an empty cache from the model's configuration; None takes a DynamicCache.
    keeps_hidden: whether `hidden` holds what went into the output layer in the last forward, [batch, rows, width].
    Raises ValueError for a PEFT model whose adapter puts virtual tokens before a text.
    """

    def __init__(self, model: PreTrainedModel, make_cache: Callable[[Any], Any] | None = None) -> None:
        self.model = model
        self.make_cache = make_cache
        self.keeps_hidden = False
        self.hidden: Tensor | None = None
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise ValueError("members: expected a PEFT adapter of weights, got one of virtual tokens (prompt learning)")
        self._adapters = active_adapters(model)
        names = inspect.signature(self.base.forward).parameters
        self._names = frozenset(names)
        self._cache_name = next((name for name in ("cache", "past_key_values") if name in names), None)
        self._slices_logits = "logits_to_keep" in names

    @property
    def base(self) -> PreTrainedModel:
        return unwrapped(self.model)

    @property
    def device(self) -> torch.device:
        """Where token ids go in."""
        return input_device(self.base)

    @property
    def dtype(self) -> torch.dtype:
        """Of the embeddings, and so of the attention's scores."""
        return self.base.get_input_embeddings().weight.dtype

    @property
    def vocab_size(self) -> int:
        """Token ids below this one can be fed."""
        return self.base.get_input_embeddings().weight.shape[0]

    @property
    def max_length(self) -> int | None:
        """The longest sequence the model was built for, or None where its configuration does not say."""
        return rope.max_positions(self.text_config)

    @property
    def text_config(self) -> Any:
        """Of the part of the model that reads text."""
        config: Any = self.base.config
        return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config

    @property
    def end_tokens(self) -> frozenset[int]:
        """The ids that end a text, by the model's generation settings."""
        return as_ids(getattr(self.base.generation_config or self.base.config, "eos_token_id", None))

    @property
    def has_cache(self) -> bool:
        """Whether a forward takes a cache of the kind that `generate` would make for it."""
        supports = getattr(self.base, "_supports_default_dynamic_cache", None)
        return self._cache_name is not None and (self.make_cache is not None or supports is None or supports())

    @property
    def carries_memories(self) -> bool:
        """Whether forwards take and return hidden states of a text (XLNet), of which `generate` reads a part again."""
        return "mems" in self._names

    def new_cache(self) -> Any:
        """An empty cache of the class that the model's layers need."""
        config = self.base.config
        return DynamicCache(config=config) if self.make_cache is None else self.make_cache(config)

    @cached_property
    def switch_length(self) -> int | None:
        """Texts up to this many tokens are read with other rotary factors than longer ones."""
        return rope.switch_length(self.text_config)

    @cached_property
    def growth_length(self) -> int | None:
        """Each token after this many changes the rotary frequencies, so that it needs a forward of its own."""
        return rope.growth_length(self.text_config)

    @cached_property
    def drops_cache(self) -> bool:
        """Whether `generate` reads the whole text again where it outgrows `switch_length`."""
        if self.switch_length is None or not self._has_contract:
            return False
        ids = torch.zeros(1, self.switch_length + 1, dtype=torch.long, device=self.device)
        cache = self.new_cache()
        return self._inputs(ids, cache, self.switch_length).get(str(self._cache_name)) is not cache

    @property
    def takes_masks(self) -> bool:
        """Whether an attention mask of any form, and positions, can be handed over."""
        return {"attention_mask", "position_ids"} <= self._names and self._attention in MASKED_ATTENTION

    @property
    def _attention(self) -> str | None:
        return getattr(self.base.config, "_attn_implementation", None)

    def is_same_as(self, other: Any) -> bool:
        """Whether a forward of the one may stand for a forward of the other."""
        if not isinstance(other, Model) or self.make_cache is not other.make_cache:
            return False
        if self._active_names != other._active_names:
            return False
        with with_adapters(self._adapters), with_adapters(other._adapters):  # what is active elsewhere is no difference
            return same_function(self.model, other.model)

    @property
    def _active_names(self) -> list[list[str]]:
        return [names for _, names in self._adapters]

    def read(self, texts: Tensor, cache: Any, num_cached: int, rows: int) -> Tensor:
        """Logits [batch, rows, vocab] of the last `rows` positions of texts [batch, length].

        As `generate` reads them: with the inputs that the model itself prepares. cache: holds the first `num_cached`
        tokens of each text; None reads all of them.
        """
        if self.growth_length is not None:
            rope.forget_longest(self.base)
        inputs = self._inputs(texts, cache, num_cached)
        inputs = {name: value for name, value in inputs.items() if value is not None}
        if cache is not None:
            inputs[str(self._cache_name)] = cache
        return self._call(inputs, rows)

    @cached_property
    def _has_contract(self) -> bool:
        own = getattr(self.base, "prepare_inputs_for_generation", None)
        general = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
        return own is not None and "next_sequence_length" in general

    def _inputs(self, texts: Tensor, cache: Any, num_cached: int) -> dict[str, Any]:
        """What a forward takes for the tokens after the first `num_cached`."""
        positions = {"position_ids": torch.arange(texts.shape[1], device=texts.device)[None].expand(texts.shape)}
        given: dict[str, Any] = positions if "position_ids" in self._names else {}
        if not self._has_contract:
            given = {name: value[:, num_cached:] if name == "position_ids" else value for name, value in given.items()}
            return {"input_ids": texts[:, num_cached:], "use_cache": cache is not None, **given}
        if "attention_mask" in self._names:
            given = {"attention_mask": torch.ones_like(texts)} | given
        if cache is not None:
            given |= {str(self._cache_name): cache, "next_sequence_length": texts.shape[1] - num_cached}
        return self.base.prepare_inputs_for_generation(
            texts, is_first_iteration=num_cached == 0, use_cache=cache is not None, **given
        )

    def forward(self, input_ids: Tensor, cache: Any, rows: int, **attention: Tensor) -> Tensor:
        """Feed input_ids [batch, new] after the cache; logits [batch, rows, vocab] of the last `rows` positions.

        Where they have a third axis, they are hidden states in the place of the embeddings.
        attention: attention_mask and position_ids, of the rows of a ragged batch or of the nodes of a draft tree.
        """
        name = "input_ids" if input_ids.dim() == 2 else "inputs_embeds"
        return self._call({name: input_ids, str(self._cache_name): cache, "use_cache": True, **attention}, rows)

    def _call(self, inputs: dict[str, Any], rows: int) -> Tensor:
        if self._slices_logits:
            inputs["logits_to_keep"] = rows
        with with_adapters(self._adapters), self._hidden_kept(rows) if self.keeps_hidden else nullcontext():
            output = self.model(**inputs)
        return output.logits[:, -rows:]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Put the model into eval mode for a while; each of its modules that was in train mode is in it again after."""
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            yield
        finally:
            for module in training:
                module.training = True

    def keep_hidden(self) -> None:
        """Keep what goes into the output layer. Raises ValueError where there is none."""
        if self.base.get_output_embeddings() is None:
            raise ValueError(f"heads: expected a member with an output layer, got {type(self.base).__name__}")
        self.keeps_hidden = True

    @property
    def generation_config(self) -> Any:
        """Its settings of texts, where it has any."""
        return getattr(self.base, "generation_config", None)

    @contextmanager
    def _hidden_kept(self, rows: int) -> Iterator[None]:
        def keep(_: Any, arguments: tuple[Tensor, ...]) -> None:
            self.hidden = arguments[0][:, -rows:]

        hook = self.base.get_output_embeddings().register_forward_pre_hook(keep)
        try:
            yield
        finally:
            hook.remove()


def as_ids(setting: int | list[int] | None) -> frozenset[int]:
    """An end-of-sequence setting, which may be one id, several or none, as a set."""
    if setting is None:
        return frozenset()
    return frozenset([setting] if isinstance(setting, int) else setting)
