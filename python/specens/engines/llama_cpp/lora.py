"""A PEFT adapter as llama.cpp loads it: the same matrices under its names, in a GGUF file."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specens.engines.llama_cpp.model import GGUFModel

ARCHITECTURE = "llama"  # whose heads the converter of llama.cpp permutes, as is done here
PLAIN: dict[str, Any] = {"peft_type": "LORA", "bias": "none", "use_dora": False, "fan_in_fan_out": False}
PLAIN |= {"modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {}, "layer_replication": None}


def write_lora(adapter: Path, model: GGUFModel, path: Path) -> None:
    """Write a LoRA of PEFT's, a folder, for a model of the architecture llama.

    Its scale is multiplied into the matrices. Raises ValueError where the adapter is more than a LoRA of weights, the
    model is of another architecture, or the package gguf is missing.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(f"model: the adapter {str(adapter)!r} needs gguf beside llama.cpp; try: pip install gguf")
    import gguf
    from safetensors.torch import load_file

    settings = json.loads((adapter / "adapter_config.json").read_bytes())
    _check(settings, adapter, model)
    scale = settings["lora_alpha"] / (settings["r"] ** 0.5 if settings.get("use_rslora") else settings["r"])
    heads = {name: int(model.metadata[f"{ARCHITECTURE}.attention.{key}"]) for name, key in _HEADS.items()}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, int(model.metadata[f"{ARCHITECTURE}.block_count"]))
    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    writer.add_string(gguf.Keys.General.TYPE, "adapter")
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, 0.0)  # which stands for a scale of 1
    for key, matrix in load_file(adapter / "adapter_model.safetensors").items():
        module, _, which = key.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
        name = names.get_name(module)
        if name is None or which not in ("lora_A", "lora_B"):
            raise ValueError(f"model: expected matrices of a LoRA in {str(adapter)!r}, got {key}")
        numbers = matrix.to(torch.float32).numpy()
        if which == "lora_B":
            numbers = _permuted(numbers, heads.get(module.rpartition(".")[2])) * np.float32(scale)
        writer.add_tensor(f"{name}.weight.{which.lower()}", numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_HEADS = {"q_proj": "head_count", "k_proj": "head_count_kv"}


def _check(settings: dict[str, Any], adapter: Path, model: GGUFModel) -> None:
    for name, value in PLAIN.items():
        if settings.get(name, value) not in (value, None):
            raise ValueError(
                f"model: expected {name} {value!r} in {str(adapter)!r} for llama.cpp, got {settings[name]!r}; "
                "transformers:MODEL+ADAPTER merges it"
            )
    architecture = model.metadata.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise ValueError(
            f"model: expected a LoRA in a GGUF file for {model.path.name} of the architecture {architecture}, got the "
            f"folder {str(adapter)!r}; convert_lora_to_gguf.py of llama.cpp makes one"
        )


def _permuted(matrix: np.ndarray, num_heads: int | None) -> np.ndarray:
    """Rows [out, rank] as llama.cpp has them: of each head those that rotate together lie side by side."""
    if num_heads is None:
        return matrix
    halves = matrix.reshape(num_heads, 2, -1, matrix.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(matrix.shape)
