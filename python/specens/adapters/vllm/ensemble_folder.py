"""Writing the folder that vLLM serves an ensemble from. Nothing here imports vLLM."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from specens.adapters.vllm.ensemble_settings import ARCHITECTURE, KEY, EnsembleSettings
from specens.engines.transformers.load import (
    ModelSource,
    load_model,
    load_tokenizer,
    resolve_model,
    without_progress_bars,
)

NOT_KEPT = ("quantization_config", "auto_map", "_name_or_path")  # of a config: what is the member's own


def write_ensemble(
    models: Sequence[str], ensemble: Any, folder: Path, dtype: str | torch.dtype = torch.bfloat16
) -> EnsembleSettings:
    """Write config.json, tokenizer and generation config of an ensemble for `vllm serve FOLDER`.

    models: specs as `load_model` takes them. Folders and names of the hub stay where they are; others (GGUF files,
    packages, merged adapters) are written to FOLDER/member0, member1, ... in `dtype`. ensemble: None mixes evenly.
    Raises ValueError where a member cannot be one, tokenizers differ or the folder has something in it.
    """
    if len(models) < 2:
        raise ValueError(f"MODELS: expected two members or more, got {len(models)}")
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"--out: expected a new or empty folder, got {folder}")
    tokenizers = [load_tokenizer(model, dtype=dtype) for model in models]
    for index, tokenizer in enumerate(tokenizers):
        if tokenizer.get_vocab() != tokenizers[0].get_vocab():
            raise ValueError(f"MODELS: the tokenizer of member {index}, {models[index]}, differs from the first one's")
    folder.mkdir(parents=True, exist_ok=True)
    members = [_member(model, folder, index, dtype) for index, model in enumerate(models)]
    configs = [AutoConfig.from_pretrained(folder / member if member.startswith("./") else member) for member in members]
    settings = EnsembleSettings.of_ensemble(members, ensemble)
    (folder / "config.json").write_text(json.dumps(config_of(configs, settings), indent=2) + "\n")
    tokenizers[0].save_pretrained(folder)
    first = folder / members[0] if members[0].startswith("./") else Path(members[0])
    if (first / "generation_config.json").is_file():
        (folder / "generation_config.json").write_bytes((first / "generation_config.json").read_bytes())
    return settings


def _member(model: str, folder: Path, index: int, dtype: str | torch.dtype) -> str:
    """What the config calls a member; one that vLLM could not load by itself is written beside the config."""
    source: ModelSource = resolve_model(model)
    if source.adapter is None and source.hub is not None:
        return "@".join(source.hub)
    if source.adapter is None and source.path.is_dir():
        return str(source.path.resolve())
    name = f"member{index}"
    with without_progress_bars():
        load_model(model, dtype=dtype, device="cpu").save_pretrained(folder / name)
    load_tokenizer(model, dtype=dtype).save_pretrained(folder / name)
    return f"./{name}"


def config_of(configs: Sequence[PretrainedConfig], settings: EnsembleSettings) -> dict[str, Any]:
    """The first member's config, with what holds for all: the widest vocabulary and the shortest length."""
    if nested := [config.model_type for config in configs if config.get_text_config() is not config]:
        raise ValueError(f"MODELS: expected models of text alone, got {', '.join(nested)}")
    first = {name: value for name, value in configs[0].to_dict().items() if name not in NOT_KEPT}
    lengths = [length for config in configs if (length := getattr(config, "max_position_embeddings", None))]
    first |= {"architectures": [ARCHITECTURE], KEY: settings.to_config()}
    first["vocab_size"] = max(config.vocab_size for config in configs)
    return first | ({"max_position_embeddings": min(lengths)} if lengths else {})
