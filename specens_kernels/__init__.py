"""Fused verification for speculative decoding and for ensembles of language models."""

from specens_kernels.backend import BackendInfo, backends
from specens_kernels.ops.sample import sample
from specens_kernels.ops.target_logprobs import target_logprobs
from specens_kernels.ops.uniforms import uniforms
from specens_kernels.ops.verify_chain import verify_chain
from specens_kernels.types import (
    Contrastive,
    Draw,
    LogitMixture,
    Mixture,
    Processing,
    Sampling,
    Status,
    Synthetic,
    Typical,
    Verdict,
)

__version__ = "0.1.0"

__all__ = [
    "BackendInfo",
    "Contrastive",
    "Draw",
    "LogitMixture",
    "Mixture",
    "Processing",
    "Sampling",
    "Status",
    "Synthetic",
    "Typical",
    "Verdict",
    "backends",
    "sample",
    "target_logprobs",
    "uniforms",
    "verify_chain",
]
