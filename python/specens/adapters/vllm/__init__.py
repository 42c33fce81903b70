"""vLLM verifies drafts by `verify_chain`: a plug-in, switched on by SPECENS_VLLM=1. README.md says what it replaces."""

from __future__ import annotations

import os

VARIABLE = "SPECENS_VLLM"
ON, OFF = ("1",), ("", "0")


def register() -> None:
    """What vLLM calls in each of its processes. Does nothing unless the variable SPECENS_VLLM is 1.

    Raises ValueError for another value of it, and RuntimeError for a vLLM that is not supported, before anything of
    it is replaced.
    """
    value = os.environ.get(VARIABLE, "")
    if value in OFF:
        return
    if value not in ON:
        raise ValueError(f"{VARIABLE}: expected 1 (on) or 0 (off), got {value!r}")
    # Whatever imports vLLM waits for the switch, so that the package costs nothing where it is off.
    from specens.adapters.vllm.replacements import install

    install()
