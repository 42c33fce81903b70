"""A model of some of another model's layers, with the same parameters."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel


def num_layers(model: PreTrainedModel) -> int:
    """How many decoder layers a causal LM has. Raises ValueError where it is not built of such in `model.layers`."""
    return len(_decoder(model).layers)


def with_layers(model: PreTrainedModel, kept: Sequence[int]) -> PreTrainedModel:
    """The model of the layers with these numbers, in this order, its embedding, last norm and output layer.

    Parameters are shared, and nothing of `model` changes: what has to be another, which is the configuration and each
    layer's number in the cache, belongs to copies of the modules around it.
    Raises ValueError where the model is not built of decoder layers with attention in `model.layers`.
    """
    decoder = _decoder(model)
    config = copy.copy(model.config)
    config.num_hidden_layers = len(kept)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[number] for number in kept]
    layers = [_numbered(decoder.layers[number], index) for index, number in enumerate(kept)]
    fewer = _shallow(decoder, layers=nn.ModuleList(layers))
    fewer.config = config
    whole = _shallow(model, model=fewer)
    whole.config = config
    return whole


def _decoder(model: PreTrainedModel) -> Any:
    decoder = getattr(model, "model", None)
    layers = getattr(decoder, "layers", None)
    suits = isinstance(layers, nn.ModuleList) and all(hasattr(layer, "self_attn") for layer in layers)
    num_shared: int = getattr(model.config, "num_kv_shared_layers", 0)
    if not suits or num_shared:
        raise ValueError(
            "drafter: expected a model whose layers, in model.layers, all have attention and a cache of their own; "
            f"got {type(model).__name__}"
        )
    return decoder


def _numbered(layer: nn.Module, index: int) -> nn.Module:
    """The layer with another place in the cache."""
    modules = {name: _numbered(module, index) if _has_number(module) else module for name, module in _children(layer)}
    copied = _shallow(layer, **modules)
    if hasattr(copied, "layer_idx"):
        copied.layer_idx = index
    return copied


def _has_number(module: nn.Module) -> bool:
    return any(hasattr(part, "layer_idx") for part in module.modules())


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, child) for name, child in module.named_children() if child is not None]


def _shallow(module: Any, **modules: nn.Module) -> Any:
    """Another module object with the same parameters, and other parts of these names."""
    if "forward" in vars(module):  # it calls the module that it was made for, as accelerate's does on several devices
        raise ValueError(f"drafter: expected a model whose modules have not been hooked, got a {type(module).__name__}")
    copied = copy.copy(module)
    copied._modules = {**module._modules, **modules}
    return copied
