"""A Hugging Face causal language model behind the few operations that the driver needs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from specens.adapters.modes import evaluating
from specens.kv_cache import is_recurrent

MASKED_ATTENTION = ("sdpa", "eager")


class CausalLM:
    """One loaded model: forward on a cache, and the facts about it that a member asks for.

    model: a causal LM of transformers, or one wrapped by PEFT; generations put it into eval mode for their time.
    make_cache: an empty cache from the model's configuration; None takes a DynamicCache.
    keeps_hidden: whether `hidden` holds what went into the output layer in the last forward, [batch, rows, width].
    """

    def __init__(self, model: PreTrainedModel, make_cache: Callable[[Any], Any] | None = None) -> None:
        self.model = model
        self.make_cache = make_cache
        self.keeps_hidden = False
        self.hidden: Tensor | None = None
        names = inspect.signature(self.base.forward).parameters
        cache_names = [name for name in ("cache", "past_key_values") if name in names]
        if not cache_names:
            raise ValueError(f"members: expected a model with a key-value cache, got {type(self.base).__name__}")
        self._cache_name = cache_names[0]
        self._slices_logits = "logits_to_keep" in names
        self._takes_positions = {"attention_mask", "position_ids"} <= set(names)

    @property
    def base(self) -> PreTrainedModel:
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    @property
    def device(self) -> torch.device:
        """Where token ids go in."""
        return self.base.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the embeddings, and so of the attention's scores."""
        return self.base.get_input_embeddings().weight.dtype

    @property
    def num_embeddings(self) -> int:
        """Token ids below this one can be fed."""
        return self.base.get_input_embeddings().weight.shape[0]

    @property
    def max_positions(self) -> int | None:
        """The longest sequence the model was built for, or None where its configuration does not say."""
        return getattr(self.base.config.get_text_config(decoder=True), "max_position_embeddings", None)

    @property
    def end_of_sequence(self) -> set[int]:
        """The ids that end a text, by the model's generation settings."""
        return as_ids(getattr(self.base.generation_config or self.base.config, "eos_token_id", None))

    def new_cache(self) -> Any:
        """An empty cache of the class that the model's layers need."""
        config = self.base.config
        return DynamicCache(config=config) if self.make_cache is None else self.make_cache(config)

    @cached_property
    def reads_several(self) -> bool:
        """Whether one forward of several tokens goes on from a recurrent state; in some models it starts from nothing.

        Found out by trying: reading 6 tokens as 3 and 3 must be as near to reading them at once as 3 and 1 and 1 and 1.
        """
        if not is_recurrent(self.new_cache()):
            return True
        whole, halves, singles = (self._last_logits(parts) for parts in ((6,), (3, 3), (3, 1, 1, 1)))
        noise = (singles - whole).abs().max() + 1e-5 * whole.abs().max()
        return bool((halves - whole).abs().max() <= 3 * noise)

    @torch.inference_mode()
    def _last_logits(self, parts: tuple[int, ...]) -> Tensor:
        """Logits [vocab] behind the first ids, fed in parts of these lengths."""
        cache = self.new_cache()
        ids = torch.arange(sum(parts), device=self.device) % self.num_embeddings
        with evaluating([self]):
            logits = [self.forward(part[None], cache, 1) for part in ids.split(list(parts))]
        return logits[-1][0, -1].float()

    @property
    def takes_masks(self) -> bool:
        """Whether an attention mask of any form, and positions, can be handed over."""
        return self._takes_positions and self._attention in MASKED_ATTENTION

    @property
    def _attention(self) -> str | None:
        return getattr(self.base.config, "_attn_implementation", None)

    def check_reads_trees(self) -> None:
        """Raise ValueError where the model does not take the attention mask and the positions of a draft tree."""
        kind, attention = type(self.base).__name__, self._attention
        if not self._takes_positions:
            raise ValueError(f"members: expected a model that takes position ids under schedule 'tree', got {kind}")
        if attention not in MASKED_ATTENTION:
            raise ValueError(
                f"members: expected {kind} with attention {' or '.join(MASKED_ATTENTION)} under schedule 'tree', "
                f"got {attention}"
            )

    def check_generated(self, tokens: list[int], index: int) -> None:
        """Raise ValueError where the model, member `index` of its ensemble, has no embedding for a generated token."""
        if tokens and max(tokens) >= self.num_embeddings:
            raise ValueError(
                f"members: token {max(tokens)} was generated, but member {index} has embeddings only for ids below "
                f"{self.num_embeddings}; do the members share one tokenizer?"
            )

    def weights_key(self) -> tuple:
        """Equal for two models exactly if they compute the same function from the same memory."""
        storages = tuple((weight.data_ptr(), weight.shape, weight.stride()) for weight in self.model.parameters())
        return type(self.base), str(self.base.config.to_dict()), storages

    def forward(self, input_ids: Tensor, cache: Any, rows: int, **attention: Tensor) -> Tensor:
        """Feed input_ids [batch, new] behind the cache; logits [batch, rows, vocab] of the last `rows` positions.

        attention: attention_mask and position_ids, of a left-padded batch or of the nodes of a draft tree.
        """
        arguments = {self._cache_name: cache, **attention}
        if self._slices_logits:
            arguments["logits_to_keep"] = rows
        with self._hidden_kept(rows) if self.keeps_hidden else nullcontext():
            output = self.model(input_ids=input_ids, use_cache=True, **arguments)
        return output.logits if self._slices_logits else output.logits[:, -rows:]

    @contextmanager
    def _hidden_kept(self, rows: int) -> Iterator[None]:
        def keep(_: Any, arguments: tuple[Tensor, ...]) -> None:
            self.hidden = arguments[0][:, -rows:]

        hook = self.base.get_output_embeddings().register_forward_pre_hook(keep)
        try:
            yield
        finally:
            hook.remove()


def as_ids(setting: int | list[int] | None) -> set[int]:
    """An end-of-sequence setting, which may be one id, several or none, as a set."""
    if setting is None:
        return set()
    return {setting} if isinstance(setting, int) else set(setting)
