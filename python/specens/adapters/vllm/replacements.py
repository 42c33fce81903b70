"""Replacing functions of vLLM: all of them, or none."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from specens.adapters.vllm.ensemble_settings import ARCHITECTURE
from specens.adapters.vllm.versions import check_version

INSTALLED = "replaced_by_specens"


class Replacement(NamedTuple):
    """owner.name, a function with these parameters, becomes make(owner.name)."""

    owner: Any
    name: str
    parameters: tuple[str, ...]
    make: Callable[[Callable], Callable]


def install(rule: str) -> None:
    """Replace what README.md lists, in this process. A second call changes nothing.

    rule: "token", where a configured one does not take its place, or "gumbel", for all sampling.
    """
    import vllm

    check_version(vllm.__version__)
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from specens.adapters.vllm import v1, v2, v2_ensemble
    from specens.adapters.vllm.ensemble_config import EnsembleConfig
    from specens.adapters.vllm.ensemble_model import SpecensEnsemble

    replace_all([*v1.replacements(rule), *v2.replacements(rule), *v2_ensemble.replacements(rule)])
    vllm.ModelRegistry.register_model(ARCHITECTURE, SpecensEnsemble)
    MODELS_CONFIG_MAP[ARCHITECTURE] = EnsembleConfig


def replace_all(replacements: Sequence[Replacement]) -> None:
    """Raise RuntimeError if a function is not as expected, before the first is replaced."""
    for owner, name, parameters, _ in replacements:
        found = tuple(inspect.signature(getattr(owner, name)).parameters)
        if found != parameters:
            raise RuntimeError(
                f"vLLM: expected {owner.__name__}.{name} with the parameters {', '.join(parameters)}, "
                f"got {', '.join(found)}"
            )
    for owner, name, _, make in replacements:
        original = getattr(owner, name)
        if not hasattr(original, INSTALLED):
            replaced = functools.wraps(original)(make(original))
            setattr(replaced, INSTALLED, True)
            setattr(owner, name, replaced)
