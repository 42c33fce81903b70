"""llama.cpp as llama-cpp-python carries it: the C functions, and what they say where one fails."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
from collections import deque
from functools import cache
from typing import Any

import torch  # noqa: F401  before llama.cpp, which then shares its OpenMP threads

logger = logging.getLogger(__name__)

PACKAGE = "llama-cpp-python"
INSTALL = "pip install 'specens-kernels[llama-cpp]'"
ERROR = 4  # of ggml's levels
_said: deque[str] = deque(maxlen=20)


def is_installed() -> bool:
    """Whether llama-cpp-python is here; it is not imported for that."""
    return importlib.util.find_spec("llama_cpp") is not None


@cache
def library() -> Any:
    """The module of llama.cpp's C functions. Raises ValueError, saying how it is installed, where it is not."""
    if not is_installed():
        raise ValueError(f"llama_cpp: expected {PACKAGE} to be installed; try: {INSTALL}")
    import llama_cpp.llama_cpp as functions

    functions.llama_log_set(_keep_log(functions), None)
    functions.llama_backend_init()
    return functions


def last_errors() -> str:
    """What llama.cpp has logged as errors since the last call, which it reports in no other way."""
    said = " ".join(line.strip() for line in _said)
    _said.clear()
    return said


@cache
def _keep_log(functions: Any) -> Any:
    """The callback, kept alive for as long as the process."""

    @functions.llama_log_callback
    def log(level: int, text: bytes, _: ctypes.c_void_p) -> None:
        line = text.decode(errors="replace").rstrip("\n")
        if level == ERROR:
            _said.append(line)
        if line.strip(". "):
            logger.debug("%s", line)  # an error is raised with what was said, or is none: a full cache grows

    return log
