"""What rotary position embeddings do to long texts: how far they reach, and where they change with the length."""

from __future__ import annotations

from typing import Any

import torch

EXTENDED = ("linear", "dynamic")  # by their factor; the others' configurations count it in already


def rope_settings(config: Any) -> list[dict[str, Any]]:
    """The rotary embeddings of a text configuration, of which there may be one for each kind of layer."""
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return [each for each in ([given] if "rope_type" in given else given.values()) if isinstance(each, dict)]


def max_positions(config: Any) -> int | None:
    """The longest sequence that a model was built for, or None where its text configuration sets no limit.

    Rotary embeddings that are scaled by a factor reach that much further, and ALiBi has no end.
    """
    most = getattr(config, "max_position_embeddings", None)
    if not isinstance(most, int) or most <= 0 or getattr(config, "alibi", False):
        return None
    lengths = [most]
    for rope in rope_settings(config):
        factor = rope.get("factor") or 1.0
        if rope["rope_type"] in EXTENDED:
            lengths.append(int(most * factor))
        elif rope["rope_type"] == "yarn":
            lengths.append(int((rope.get("original_max_position_embeddings") or 0) * factor))
    return max(lengths)


def switch_length(config: Any) -> int | None:
    """Texts of more tokens than this are read with other factors than shorter ones (LongRoPE); None for no model."""
    lengths = [
        rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
        for rope in rope_settings(config)
        if rope["rope_type"] == "longrope"
    ]
    return next(filter(None, lengths), None)


def growth_length(config: Any) -> int | None:
    """Behind this many tokens each further one changes the frequencies (dynamic NTK); None for no model."""
    grows = any(rope["rope_type"] == "dynamic" for rope in rope_settings(config))
    return getattr(config, "max_position_embeddings", None) if grows else None


def forget_longest(model: torch.nn.Module) -> None:
    """Let dynamic rotary embeddings forget the longest text they saw: they would read a shorter one by its length."""
    for module in model.modules():
        if not hasattr(module, "original_max_seq_len"):
            continue
        for name in [name for name in vars(module) if name.endswith("max_seq_len_cached")]:
            kind = name.removesuffix("max_seq_len_cached")
            setattr(module, name, module.original_max_seq_len)
            frequencies = getattr(module, f"{kind}inv_freq")
            original = getattr(module, f"{kind}original_inv_freq").to(frequencies.device)
            module.register_buffer(f"{kind}inv_freq", original.clone(), persistent=False)
