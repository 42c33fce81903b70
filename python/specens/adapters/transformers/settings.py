"""What `generate` of transformers may be asked for where an ensemble speculates, and the prompts in its inputs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, PrefixConstrainedLogitsProcessor

from specens.engines.transformers.generation_config import REFUSED

DONE_BY_GENERATE = ("num_return_sequences", "max_time", "token_healing")  # before and around what it leaves to us
SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {  # of the fields of a generation config that ask for something else
    name: values for name, (values, _) in REFUSED.items() if name not in DONE_BY_GENERATE
} | {"cache_implementation": (None, "dynamic"), "prefill_chunk_size": (None,), "compile_config": (None,)}
INPUTS = ("attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "logits_to_keep")


def check_settings(
    model: Any, members: Sequence[Any], generation_config: Any, synced_gpus: bool, model_kwargs: dict[str, Any]
) -> None:
    """Raise ValueError naming what is asked for and not supported."""
    if model.config.is_encoder_decoder:
        raise ValueError(f"model: expected a decoder without encoder, got {type(model).__name__}")
    if isinstance(members, str) or not members or any(isinstance(member, str) for member in members):
        raise ValueError(f"members: expected the other models of the ensemble, loaded; got {members!r}")
    if synced_gpus:
        raise ValueError(f"synced_gpus: expected False, got {synced_gpus!r}")
    for name, values in SUPPORTED_VALUES.items():
        value = getattr(generation_config, name, None)
        if value not in values:
            raise ValueError(f"{name}: expected {values[-1]!r} with speculative_ensemble, got {value!r}")
    for name, value in model_kwargs.items():
        if name not in INPUTS and value is not None:
            raise ValueError(f"{name}: expected only token ids and their attention mask, got {type(value).__name__}")
        if name in ("cache", "past_key_values") and value is not None and _is_of_caller(value):
            raise ValueError(f"{name}: expected None, as every member makes its own; got {type(value).__name__}")


def processors_of_row(processors: Sequence[Any], index: int, padding: Tensor) -> list[Any]:
    """Processors that see one row as they see it in its batch.

    index: of the row. padding: its tokens before the prompt, [tokens].
    """
    own = [_of_row(processor, index) for processor in processors]
    return [_Padded(processor, padding) for processor in own] if len(padding) else own


def _of_row(processor: Any, index: int) -> Any:
    """A processor that does for one row alone what it does for it in a batch."""
    ignored = getattr(processor, "prompt_ignore_length", None)
    if isinstance(ignored, Tensor):
        own = copy.copy(processor)
        own.prompt_ignore_length = int(ignored[index])
        return own
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        allowed, prompt = processor._prefix_allowed_tokens_fn, index // processor._num_beams
        return PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(prompt, ids), 1)
    return processor


class _Padded(LogitsProcessor):
    """Shows a processor the padding before a prompt, by which it counts in a batch."""

    def __init__(self, processor: Any, padding: Tensor) -> None:
        self._processor, self._padding = processor, padding

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Of ids [1, tokens] without the padding and scores [1, vocab]."""
        return self._processor(torch.cat([self._padding[None].to(input_ids.device), input_ids], dim=1), scores)


def _is_of_caller(cache: Any) -> bool:
    return getattr(cache, "_is_user_defined", False) or cache.get_seq_length() > 0


def prompts_of(input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> list[list[int]]:
    """The token ids of each prompt, without the padding before it.

    input_ids, attention_mask (None: no padding): [batch, tokens]. Raises ValueError where padding is not on the left,
    or where position ids do not count the tokens.
    """
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    if mask.shape != input_ids.shape:
        raise ValueError(f"attention_mask: expected {list(input_ids.shape)}, got {list(mask.shape)}")
    is_token = mask != 0
    if bool((is_token[:, :-1] & ~is_token[:, 1:]).any()):
        raise ValueError("attention_mask: expected padding on the left only, got a 0 after a 1")
    if position_ids is not None:
        counted = (is_token.long().cumsum(1) - 1).expand(len(input_ids), -1)
        if position_ids.shape[-1] != counted.shape[1] or bool(((position_ids != counted) & is_token).any()):
            raise ValueError("position_ids: expected them to count the tokens of each prompt from 0, or None")
    return [row[kept].tolist() for row, kept in zip(input_ids, is_token, strict=True)]
