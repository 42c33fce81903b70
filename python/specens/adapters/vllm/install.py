"""Replacing all that the plug-in replaces, and its model class for ensembles."""

from __future__ import annotations

import logging

from specens.adapters.vllm.ensemble_settings import ARCHITECTURE
from specens.adapters.vllm.replacements import replace_all
from specens.adapters.vllm.versions import check_version


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
    # A name below vLLM's own, whose handler shows what it says.
    logging.getLogger("vllm.specens").info("specens-kernels verifies drafts, by the rule %r where none is set", rule)
