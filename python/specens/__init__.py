"""Text from speculative ensembles of Hugging Face language models, on the operations of `specens_kernels`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from specens.generate import Generation, SpeculativeEnsemble
    from specens.jobs import Job, Settings
    from specens.prompts import MemberPrompts
    from specens.request import Event
    from specens.schedules.plan import TreePlan
    from specens.statistics import Statistics
    from specens.targets import Cascade, Custom
    from specens.trace import Round

__all__ = [
    "Cascade",
    "Custom",
    "Event",
    "Generation",
    "Job",
    "MemberPrompts",
    "Round",
    "Settings",
    "SpeculativeEnsemble",
    "Statistics",
    "TreePlan",
    "__version__",
]

# Loaded on first use: the command line answers --help, and `doctor` explains a broken installation, without torch.
_HOMES = {
    "Cascade": "specens.targets",
    "Custom": "specens.targets",
    "Event": "specens.request",
    "Generation": "specens.generate",
    "Job": "specens.jobs",
    "MemberPrompts": "specens.prompts",
    "Round": "specens.trace",
    "Settings": "specens.jobs",
    "SpeculativeEnsemble": "specens.generate",
    "Statistics": "specens.statistics",
    "TreePlan": "specens.schedules.plan",
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
