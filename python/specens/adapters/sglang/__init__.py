"""SGLang's verification of draft trees and chains, for callers who swap an import. SGLang is not needed."""

from specens.adapters.sglang.chain import chain_block_speculative_sampling_triton, chain_speculative_sampling_triton
from specens.adapters.sglang.tree import tree_speculative_sampling_target_only

__all__ = [
    "chain_block_speculative_sampling_triton",
    "chain_speculative_sampling_triton",
    "tree_speculative_sampling_target_only",
]
