"""tree_mask: which keys the nodes of draft trees attend to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specens_kernels.backend import implementations, select_for
from specens_kernels.buffers import check_out
from specens_kernels.checks import LARGEST_INTEGER, LOGIT_DTYPES, MOST_KEYS, check_count, check_integers
from specens_kernels.ops.tree_mask import reference
from specens_kernels.ops.tree_mask.reference import MAX_NODES, Layout
from specens_kernels.results import TreeMask
from specens_kernels.values import fail
from specens_kernels.workspace import Workspace

IMPLEMENTATIONS = implementations("tree_mask", reference.tree_mask, cuda=True)
LAYOUTS = {layout.name.lower(): layout for layout in Layout}
WITH_PREFIX = (Layout.FULL, Layout.ADDITIVE)


def tree_mask(
    parents: Tensor,
    prefix_lens: Tensor,
    *,
    layout: str = "full",
    max_prefix: int | None = None,
    num_nodes: Tensor | None = None,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
    out: TreeMask | None = None,
    workspace: Workspace | None = None,
    backend: str | None = None,
) -> TreeMask:
    """Return the attention mask of draft trees, a tree a request, and the positions of their nodes.

    A node sees the committed prefix, its ancestors and itself. Its position is prefix_len + depth, 0 deep below the
    root position; keys of the prefix lie at 0 to prefix_len - 1.

    parents: int64 or int32 [batch, nodes], at most 16,384 nodes: -1 (a child of the last committed token) or an earlier
        node of the request. Another value, like the padding -2 of `TokenTree.batch`, makes the node and all below it
        padding. Padding sees itself only, so that no row is empty.
    prefix_lens: int64 or int32 [batch], committed tokens whose keys come before those of the nodes. For a tree whose
        node 0 is the last committed token (`TokenTree.with_root`) that token is not among them.
    num_nodes: int64 or int32 [batch]; nodes from there on are padding. None: `parents` alone says which are.
    layout: "full": bool [batch, nodes, max_prefix + nodes], True where seen; keys are the slots of the prefix, of which
            the first prefix_len are in use, then the nodes.
        "additive": dtype [batch, 1, nodes, max_prefix + nodes], 0 where seen, else -inf, for
            scaled_dot_product_attention. Every row has a 0, so -inf gives no NaN, and weights that are exactly 0.
        "tree": bool [batch, nodes, nodes], the keys of the nodes only.
        "packed": the same as uint8 [batch, nodes, ceil(nodes / 8)]: key j is bit j % 8 of byte j / 8. Bits after the
            last node are 0.
    max_prefix: slots of the prefix, at least the largest of prefix_lens, for "full" and "additive".
    window: a node at position x sees keys at positions > x - window only; positions count, so siblings take no room.
        "tree" and "packed" apply it to the nodes: the prefix is the caller's.
    dtype: float32, bfloat16 or float16, of "additive".
    out: a TreeMask of contiguous tensors to write into.
    workspace: a Workspace to take scratch memory on a GPU from, as in `verify_chain`.
    backend: "reference", "cpp", "triton" or None (the fastest for the device).

    Raises ValueError for an argument of another type, shape, dtype, device or range, RuntimeError for a backend that
    cannot run here. The numbers in prefix_lens are read on the CPU and outside torch.compile only; elsewhere a token of
    the prefix without a slot is not seen.
    Sources: Miao et al., "SpecInfer", ASPLOS 2024 (topology-aware mask); Cai et al., "Medusa", ICML 2024.
    """
    code = _check(parents, prefix_lens, num_nodes, layout, window, dtype)
    slots = _slots(layout, prefix_lens, max_prefix)
    (batch, nodes), given = parents.shape, {"parents": parents, "prefix_lens": prefix_lens, "num_nodes": num_nodes}
    if out is not None:
        shapes = {"mask": _mask_kind(code, batch, nodes, slots, dtype), "positions": ((batch, nodes), torch.int64)}
        check_out(out, TreeMask, shapes, given, parents.device)
    _, function = select_for(IMPLEMENTATIONS, backend, parents, "tree_mask", out, workspace)
    arguments = (parents, prefix_lens, num_nodes, code, slots, window or 0, dtype)
    if out is None:
        return TreeMask(*function(*arguments))
    function([*out], *arguments)
    return out


def _mask_kind(layout: Layout, batch: int, nodes: int, slots: int, dtype: torch.dtype) -> tuple[Any, torch.dtype]:
    """The shape and dtype of a mask."""
    if layout == Layout.PACKED:
        return (batch, nodes, (nodes + 7) // 8), torch.uint8
    if layout == Layout.ADDITIVE:
        return (batch, 1, nodes, slots + nodes), dtype
    return (batch, nodes, slots + nodes), torch.bool


def _check(
    parents: Tensor,
    prefix_lens: Tensor,
    num_nodes: Tensor | None,
    layout: str,
    window: int | None,
    dtype: torch.dtype,
) -> Layout:
    """Check all but the prefix slots; return the layout."""
    if not isinstance(parents, Tensor):
        fail("parents", "a tensor", type(parents).__name__)
    check_integers("parents", parents, (None, None), parents.device)
    batch, nodes = parents.shape
    if nodes > MAX_NODES:
        fail("parents", f"at most {MAX_NODES} nodes", nodes)
    check_integers("prefix_lens", prefix_lens, (batch,), parents.device)
    if num_nodes is not None:
        check_integers("num_nodes", num_nodes, (batch,), parents.device)
    if not isinstance(layout, str) or layout not in LAYOUTS:
        fail("layout", " or ".join(repr(name) for name in LAYOUTS), repr(layout))
    if window is not None:
        check_count("window", window, LARGEST_INTEGER, least=1)
    if not isinstance(dtype, torch.dtype) or dtype not in LOGIT_DTYPES:
        fail("dtype", " or ".join(str(known) for known in LOGIT_DTYPES), dtype)
    return LAYOUTS[layout]


def _slots(layout: str, prefix_lens: Tensor, max_prefix: int | None) -> int:
    """Columns of the prefix in the mask."""
    wanted = LAYOUTS[layout] in WITH_PREFIX
    slots = max_prefix if wanted else 0
    if slots is None:
        fail("max_prefix", f"an integer >= 0 for layout {layout!r}", None)
    check_count("max_prefix", slots, MOST_KEYS)
    readable = prefix_lens.device.type == "cpu" and not torch.compiler.is_compiling()
    if readable and prefix_lens.numel() > 0:
        lengths = prefix_lens.tolist()
        if min(lengths) < 0 or (wanted and max(lengths) > slots):
            expected = f"lengths from 0 to max_prefix, {slots}" if wanted else "lengths >= 0"
            fail("prefix_lens", expected, lengths)
    return slots
