"""Which vLLM the plug-in was written for."""

from __future__ import annotations

SUPPORTED = ("0.32.0",)


def check_version(version: str) -> None:
    """Raise RuntimeError unless this is a supported release of vLLM; a local part (+cpu) does not count."""
    if version.split("+")[0] not in SUPPORTED:
        raise RuntimeError(
            f"vLLM: expected version {' or '.join(SUPPORTED)} for verification by specens-kernels, got {version}. "
            "Unset SPECENS_VLLM to run this vLLM as it is."
        )
