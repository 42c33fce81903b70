"""What a model needs to read draft tree nodes in one forward: who sees whom, and where each token stands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specens.engines.transformers.model import Model
from specens_kernels import tree_mask
from specens_kernels.backend import backend_for
from specens_kernels.ops.verify_tree import PADDING


def tree_arguments(
    parents: Sequence[int], num_chain: int, num_cached: int, num_fed: int, cache: Any, model: Model
) -> dict[str, Tensor]:
    """Attention mask and position ids of `num_chain` tokens in a line and the nodes of a tree after them.

    parents: of all nodes, -1 below the last token before the tree. num_cached: slots in use before the chain and the
        nodes; num_fed: of the nodes, how many lie in the cache already, and are not fed again.
    Returns attention_mask [1, 1, new, slots], 0 where a token is seen, else -inf, and position_ids [1, new].
    """
    chain = range(-1, num_chain - 1)
    tree = [parent + num_chain for parent in parents]  # a chain is a tree too
    table = torch.tensor([[*chain, *tree]], device=model.device)
    prefix = torch.tensor([num_cached], device=model.device)
    backend = backend_for("tree_mask", table)
    mask, positions = tree_mask(
        table, prefix, layout="additive", max_prefix=num_cached, dtype=model.dtype, backend=backend
    )
    new = slice(num_fed, None)
    mask = mask[:, :, new]
    slots, _ = cache.get_mask_sizes(mask.shape[2], 0)  # static caches show all their slots
    unused = slots - mask.shape[3]
    return {
        "attention_mask": torch.nn.functional.pad(mask, (0, unused), value=float("-inf")),
        "position_ids": positions[:, new],
    }


def line_indices(slots: Tensor, extent: int) -> tuple[Tensor, Tensor]:
    """Which of the slots below `extent` the tokens in `slots` [rows, new] see, bool [rows, new, extent], and where each
    slot stands in its text, [1, extent]: lines.
    """
    indices = torch.arange(extent)
    return indices <= slots[:, :, None], indices[None]


def tree_indices(
    slots: Tensor, extent: int, prefixes: Sequence[int], trees: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor]:
    """The same, places [rows, extent], of rows with nodes of a tree after so many tokens. trees: their parents."""
    most = max(map(len, trees))
    table = torch.tensor([[*parents, *[PADDING] * (most - len(parents))] for parents in trees])
    prefix = torch.tensor(prefixes)[:, None]
    ancestors, positions = tree_mask(table, prefix[:, 0], layout="tree", backend=backend_for("tree_mask", table))
    seen, indices = line_indices(slots, extent)
    node = indices - prefix  # [rows, extent]
    is_node = (node >= 0) & (table != PADDING).sum(1, keepdim=True).gt(node)
    node, own = node.clamp(0, most - 1), (slots - prefix).clamp(0, most - 1)
    above = ancestors.gather(1, own[:, :, None].expand(-1, -1, most)).gather(
        2, node[:, None].expand(-1, own.shape[1], -1)
    )
    seen = torch.where(is_node[:, None] & (slots >= prefix)[:, :, None], above, seen)
    return seen, torch.where(is_node, positions.gather(1, node), indices)
