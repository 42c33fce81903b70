"""Build backend: scikit-build-core, plus a torch to compile against where none is installed.

A torch in `[build-system].requires` would make every isolated build download one (several GB with CUDA), although the
stable ABI lets the extension be built against whichever torch is already there.
"""

from __future__ import annotations

from scikit_build_core import build as _build
from scikit_build_core.build import *  # noqa: F403
from torch_location import torch_folder

BUILD_TORCH = "torch>=2.11"  # as at run time, so that one download serves both


def get_requires_for_build_wheel(config_settings: dict[str, str | list[str]] | None = None) -> list[str]:
    """Return what a wheel build needs besides `[build-system].requires`."""
    return _with_torch(_build.get_requires_for_build_wheel(config_settings))


def get_requires_for_build_editable(config_settings: dict[str, str | list[str]] | None = None) -> list[str]:
    """Return what an editable build needs besides `[build-system].requires`."""
    return _with_torch(_build.get_requires_for_build_editable(config_settings))


def _with_torch(requires: list[str]) -> list[str]:
    return requires if torch_folder() is not None else [*requires, BUILD_TORCH]
