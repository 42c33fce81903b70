"""Text from speculative ensembles of Hugging Face language models, on the operations of `specens_kernels`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from specens.decoding.request import Event
    from specens.decoding.statistics import Statistics
    from specens.decoding.stream import Stream
    from specens.decoding.trace import Round
    from specens.drafters import TreePlan
    from specens.files.workers import Workers
    from specens.generate import Generation, SpeculativeEnsemble
    from specens.settings.grammars import Grammar
    from specens.settings.jobs import Job, Settings
    from specens.settings.prompts import MemberPrompts
    from specens.targets import Cascade, Custom

__all__ = [
    "Cascade",
    "Custom",
    "Event",
    "Generation",
    "Grammar",
    "Job",
    "MemberPrompts",
    "Round",
    "Settings",
    "SpeculativeEnsemble",
    "Statistics",
    "Stream",
    "TreePlan",
    "Workers",
    "__version__",
]

# Loaded on first use: the command line answers --help, and `doctor` explains a broken installation, without torch.
_HOMES = {
    "Cascade": "specens.targets",
    "Custom": "specens.targets",
    "Event": "specens.decoding.request",
    "Generation": "specens.generate",
    "Grammar": "specens.settings.grammars",
    "Job": "specens.settings.jobs",
    "MemberPrompts": "specens.settings.prompts",
    "Round": "specens.decoding.trace",
    "Settings": "specens.settings.jobs",
    "SpeculativeEnsemble": "specens.generate",
    "Statistics": "specens.decoding.statistics",
    "Stream": "specens.decoding.stream",
    "TreePlan": "specens.drafters",
    "Workers": "specens.files.workers",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("specens-kernels")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """What is loaded, and what is there on first use."""
    return sorted({*globals(), *__all__})
