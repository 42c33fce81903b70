"""What `generate` of transformers may be asked for where an ensemble speculates, and the prompts in its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {  # of the fields of a generation config that ask for something else
    "num_beams": (None, 1),
    "use_cache": (None, True),
    "cache_implementation": (None, "dynamic"),
    "cache_config": (None,),
    "prefill_chunk_size": (None,),
    "compile_config": (None,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "assistant_ensemble_weight": (None,),
    "speculation_type": (None,),
    "use_mtp": (None, False),
    "penalty_alpha": (None,),
    "dola_layers": (None,),
    "output_scores": (None, False),
    "output_logits": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
}
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
        raise ValueError("attention_mask: expected padding on the left only, got a 0 behind a 1")
    if position_ids is not None:
        counted = (is_token.long().cumsum(1) - 1).expand(len(input_ids), -1)
        if position_ids.shape[-1] != counted.shape[1] or bool(((position_ids != counted) & is_token).any()):
            raise ValueError("position_ids: expected them to count the tokens of each prompt from 0, or None")
    return [row[kept].tolist() for row, kept in zip(input_ids, is_token, strict=True)]
