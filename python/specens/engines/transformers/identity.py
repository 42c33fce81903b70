"""Whether two models compute the same function of the same memory, and where they take their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

PLAIN = (bool, int, float, str, torch.dtype, type(None))
ACTIVE = "_active_adapter"  # of a layer of PEFT; its `set_adapter` changes what is trained, too
HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def unwrapped(model: Any) -> Any:
    """The model of transformers in a compiled one or one that PEFT wraps."""
    model = getattr(model, "_orig_mod", model)
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    return getattr(model, "_orig_mod", model)


def active_adapters(model: torch.nn.Module) -> list[tuple[torch.nn.Module, Any]]:
    """The layers that can switch adapters, as PEFT makes them, and which of theirs are active."""
    layers = [module for module in model.modules() if hasattr(module, ACTIVE) and hasattr(module, "base_layer")]
    return [(layer, _names(layer)) for layer in layers]


@contextmanager
def with_adapters(adapters: Sequence[tuple[torch.nn.Module, Any]]) -> Iterator[None]:
    """Have these adapters active, whatever is active elsewhere, and let that be as it was."""
    others = [(layer, getattr(layer, ACTIVE), names) for layer, names in adapters if _names(layer) != names]
    for layer, _, names in others:
        setattr(layer, ACTIVE, names)
    try:
        yield
    finally:
        for layer, before, _ in others:
            setattr(layer, ACTIVE, before)


def _names(layer: torch.nn.Module) -> list[str]:
    active = getattr(layer, ACTIVE)
    return [active] if isinstance(active, str) else list(active)


def same_function(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    """Whether one model may be forwarded for the other.

    Weights in the same memory are not enough: hooks, an active adapter or a setting may make them two models. Weights
    that are not there (offloaded ones) are nobody else's.
    """
    if first is second:
        return True
    ones, others = list(first.named_modules()), list(second.named_modules())
    return len(ones) == len(others) and all(map(_same_module, ones, others))


def _same_module(one: tuple[str, Any], other: tuple[str, Any]) -> bool:
    (name, first), (other_name, second) = one, other
    if name != other_name or type(first) is not type(second):
        return False
    return first is second or (_tensors(first) == _tensors(second) and _settings(first) == _settings(second))


def _tensors(module: torch.nn.Module) -> dict[str, tuple]:
    """Where each parameter and buffer lies. Buffers may be copies, so those on a host are compared by value."""
    indices: dict[str, tuple] = {}
    for name, weight in module.named_parameters(recurse=False):
        key: Any = id(weight) if weight.is_meta or weight.numel() == 0 else weight.data_ptr()
        indices[name] = (key, weight.dtype, weight.shape, weight.stride())
    for name, buffer in module.named_buffers(recurse=False):
        key = id(buffer) if buffer.is_meta else _content(buffer)
        indices[name] = (key, buffer.dtype, buffer.shape)
    return indices


def _content(buffer: Tensor) -> Any:
    return buffer.data_ptr() if buffer.is_cuda else tuple(buffer.flatten().tolist())


def _settings(module: torch.nn.Module) -> dict[str, Any]:
    """What else a forward may depend on: plain attributes, the configuration, hooks, a forward of its own."""
    own: dict[str, Any] = {name: value for name, value in vars(module).items() if isinstance(value, PLAIN)}
    del own["training"]  # generations are always in eval mode
    own |= {
        name: value for name, value in vars(module).items() if isinstance(value, (list, tuple)) and _is_plain(value)
    }
    own |= {name: tuple(map(id, vars(module)[name].values())) for name in HOOKS}
    config: Any = getattr(module, "config", None)
    replaced = {name: id(value) for name, value in vars(module).items() if name in ("forward", "_hf_hook")}
    return own | replaced | {"config": str(config.to_dict()) if hasattr(config, "to_dict") else None}


def _is_plain(values: Any) -> bool:
    return all(isinstance(value, PLAIN) for value in values)


def input_device(model: Any) -> torch.device:
    """Where token ids go in: beside the embeddings, or where hooks bring offloaded ones for a forward."""
    embeddings = model.get_input_embeddings()
    if not embeddings.weight.is_meta:
        return embeddings.weight.device
    chains = [getattr(module, "_hf_hook", None) for module in (embeddings, model)]
    for hook in [hook for chain in chains for hook in getattr(chain, "hooks", [chain])]:
        device = getattr(hook, "execution_device", None)
        if device is not None:
            return torch.device(device)
    return torch.device("cpu")
