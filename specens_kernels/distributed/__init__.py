"""The operations on shards of the vocabulary: every rank hands what it has of the logits, and gets the whole result.

For tensor-parallel models, whose last layer leaves each rank a slice of every row: no rank gathers logits. What is told
is a few numbers a row, and decided from what all have told, so that ranks never disagree. docs/distributed.md counts
bytes and collectives.
"""

from specens_kernels.distributed.operations import sample, target_logprobs, verify_chain, verify_tree

__all__ = ["sample", "target_logprobs", "verify_chain", "verify_tree"]
