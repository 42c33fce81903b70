"""Fused verification for speculative decoding and for ensembles of language models."""

from typing import TYPE_CHECKING, Any

from specens_kernels.backend import BackendInfo, backends
from specens_kernels.ensembles import Contrastive, LogitMixture, Mixture
from specens_kernels.installed import get_include, get_library
from specens_kernels.ops.compact_kv import compact_kv, compaction_pays, freed_blocks
from specens_kernels.ops.sample import sample
from specens_kernels.ops.target_logprobs import target_logprobs
from specens_kernels.ops.tree_attention import tree_attention
from specens_kernels.ops.tree_mask import tree_mask
from specens_kernels.ops.uniforms import uniforms
from specens_kernels.ops.verify_chain import verify_chain
from specens_kernels.ops.verify_tree import verify_tree
from specens_kernels.results import Compaction, Draw, Status, TreeMask, Verdict
from specens_kernels.rules import *  # noqa: F403 -- all settings of rules
from specens_kernels.rules import __all__ as settings_of_rules
from specens_kernels.sampling import Processing, Sampling
from specens_kernels.warmup import warmup
from specens_kernels.workspace import Workspace

if TYPE_CHECKING:
    from specens_kernels._host import NgramIndex, TokenTree, TreeGrowth

__version__: str

__all__ = [
    "BackendInfo",
    "Compaction",
    "Contrastive",
    "Draw",
    "LogitMixture",
    "Mixture",
    "NgramIndex",
    "Processing",
    "Sampling",
    "Status",
    "TokenTree",
    "TreeGrowth",
    "TreeMask",
    "Verdict",
    "Workspace",
    "__version__",
    "backends",
    "compact_kv",
    "compaction_pays",
    "freed_blocks",
    "get_include",
    "get_library",
    "sample",
    "target_logprobs",
    "tree_attention",
    "tree_mask",
    "uniforms",
    "verify_chain",
    "verify_tree",
    "warmup",
]
__all__ += settings_of_rules

HOST_OBJECTS = ("NgramIndex", "TokenTree", "TreeGrowth")


def __getattr__(name: str) -> Any:
    """Host objects come from the extension, and the rest of the package works where that is not built.

    The version is that of the installed distribution, which pyproject.toml alone says.
    """
    if name == "__version__":
        from importlib.metadata import version

        return version("specens-kernels")
    if name not in HOST_OBJECTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from specens_kernels import _host

    return getattr(_host, name)


def __dir__() -> list[str]:
    """What is loaded, and what is there on first use."""
    return sorted({*globals(), *__all__})
