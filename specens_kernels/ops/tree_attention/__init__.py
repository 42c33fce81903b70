"""tree_attention: attention of the nodes of draft trees over the committed prefix and their own ancestors."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor

from specens_kernels.backend import CHOSEN_BACKEND, OPERATORS, Implementation
from specens_kernels.checks import LARGEST_INTEGER, LOGIT_DTYPES, check_count, check_integers, check_tensor
from specens_kernels.ops.tree_attention import flash, reference, sdpa
from specens_kernels.ops.tree_mask.reference import MAX_NODES
from specens_kernels.values import fail, is_number

SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor parents, Tensor prefix_lens, Tensor? num_nodes,"
    " Tensor? prefix_starts, int window, float scale) -> Tensor"
)


OTHER_BACKENDS = (None, "cpp", "triton")  # what SPECENS_BACKEND may be that says nothing about this operation


def _define(name: str, kernels: dict[str, Implementation]) -> Implementation:
    """The operator of this name, with a kernel for each dispatch key."""
    OPERATORS.define(name, SCHEMA, _fake)
    for key, kernel in kernels.items():
        OPERATORS.implement(name, kernel, key)
    return cast(Implementation, getattr(torch.ops.specens, name).default)


def _fake(query: Tensor, *_: object) -> Tensor:
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)


# The kernels are those of PyTorch and of flash-attn, so their names are not those of the other operations' backends.
IMPLEMENTATIONS: dict[str, Implementation] = {
    "flash": _define("tree_attention_flash", {"CUDA": flash.tree_attention}),
    "sdpa": _define("tree_attention_sdpa", {"CPU": sdpa.by_request, "CUDA": sdpa.with_mask}),
    "reference": torch.no_grad()(reference.tree_attention),
}


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parents: Tensor,
    prefix_lens: Tensor,
    *,
    num_nodes: Tensor | None = None,
    prefix_starts: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """Return the attention of the nodes of draft trees, a tree a request: [batch, heads, nodes, dim].

    A node attends to the committed prefix, its ancestors and itself, as `tree_mask` has it: its result is that of plain
    attention at the end of the line of text that its path makes.

    query: float32, bfloat16 or float16 [batch, heads, nodes, dim].
    key, value: the cache, [batch, kv_heads, slots, dim], the same dtype; kv_heads divides heads, and query head i reads
        head i // (heads / kv_heads). Slots 0 to prefix_len - 1 of a request are its prefix, the next `nodes` slots its
        nodes (written before, as engines do). Slots after those hold nothing, but on a GPU without flash-attn they
        take part with weight 0: finite numbers there, not NaN.
    parents: int64 or int32 [batch, nodes], at most 16,384 nodes: -1 (a child of the last committed token) or an earlier
        node. Another value, like the padding -2 of `TokenTree.batch`, makes the node and all below it padding, which
        attends to itself only.
    prefix_lens: int64 or int32 [batch], slots up to the last committed token; prefix_len + nodes <= slots.
    num_nodes: int64 or int32 [batch]; nodes from there on are padding. None: `parents` alone says which are.
    prefix_starts: int64 or int32 [batch], 0 to prefix_len, the slot of the first committed token, where the slots
        before it are padding, as in batches of transformers. None: 0.
    window: a node at position x sees keys at positions > x - window only; positions count, so siblings take no room.
    scale: of the scores. None: 1 / sqrt(dim).
    backend: None for the fastest one that takes the arguments, or a name:
        "flash": the prefix by flash-attn (package flash-attn, CUDA, float16 and bfloat16), the tree apart, merged by
            their log-sum-exps;
        "sdpa": PyTorch's kernels, on the CPU a request at a time (long prefixes in the same two parts), on CUDA with a
            mask over all slots;
        "reference": float64.
        SPECENS_BACKEND may name one of these as well; the backends of other operations that it may name, "cpp" and
        "triton", leave this one as it is.

    There is no gradient. Raises ValueError for an argument of another type, shape, dtype, device or range, RuntimeError
    for a backend that was named and cannot run here. The numbers in prefix_lens and prefix_starts are read on the CPU
    only.
    Sources: Miao et al., "SpecInfer", ASPLOS 2024 (tree attention); Dao et al., "FlashAttention", NeurIPS 2022 (the
    merge of parts).
    """
    _check(query, key, value, parents, prefix_lens, num_nodes, prefix_starts, window, scale)
    function = _choose(backend, query, key, value)
    if query.numel() == 0:
        return torch.empty_like(query)
    scale = 1 / math.sqrt(query.shape[3]) if scale is None else float(scale)
    parents = parents.to(torch.int64)
    return function(query, key, value, parents, prefix_lens, num_nodes, prefix_starts, window or 0, scale)


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parents: Tensor,
    prefix_lens: Tensor,
    num_nodes: Tensor | None,
    prefix_starts: Tensor | None,
    window: int | None,
    scale: float | None,
) -> None:
    if not isinstance(query, Tensor):
        fail("query", "a tensor", type(query).__name__)
    check_tensor("query", query, (None, None, None, None), LOGIT_DTYPES, query.device)
    batch, heads, nodes, dim = query.shape
    if nodes > MAX_NODES:
        fail("query", f"at most {MAX_NODES} nodes", nodes)
    if dim < 1:
        fail("query", "heads of at least one dimension", list(query.shape))
    check_tensor("key", key, (batch, None, None, dim), (query.dtype,), query.device)
    if key.shape[1] < 1 or heads % key.shape[1] != 0:
        fail("key", f"a number of heads that divides the {heads} of query", key.shape[1])
    if key.shape[2] < nodes:
        fail("key", f"at least as many slots as nodes, {nodes}", key.shape[2])
    check_tensor("value", value, tuple(key.shape), (query.dtype,), query.device)
    check_integers("parents", parents, (batch, nodes), query.device)
    check_integers("prefix_lens", prefix_lens, (batch,), query.device)
    for name, numbers in (("num_nodes", num_nodes), ("prefix_starts", prefix_starts)):
        if numbers is not None:
            check_integers(name, numbers, (batch,), query.device)
    if window is not None:
        check_count("window", window, LARGEST_INTEGER, least=1)
    if scale is not None and (isinstance(scale, bool) or not is_number(scale) or not math.isfinite(scale)):
        fail("scale", "None or a finite number", repr(scale))
    # A fake tensor, of a subclass, has no numbers.
    if type(prefix_lens) is Tensor and query.device.type == "cpu" and not torch.compiler.is_compiling():
        sdpa.read_lengths(prefix_lens, prefix_starts, nodes, key.shape[2])


def _choose(backend: str | None, query: Tensor, key: Tensor, value: Tensor) -> Implementation:
    """The implementation by name, or the fastest one that takes the arguments."""
    argument, name = ("backend", backend) if backend is not None else ("SPECENS_BACKEND", CHOSEN_BACKEND)
    reasons = {"flash": flash.unsuited(query, key, value), "sdpa": sdpa.unsuited(query), "reference": None}
    if backend is None and name in OTHER_BACKENDS:
        name = next(known for known, reason in reasons.items() if reason is None)
    if not isinstance(name, str) or name not in IMPLEMENTATIONS:
        fail(argument, f"None or one of {', '.join(IMPLEMENTATIONS)}", repr(name))
    if reasons[name] is not None:
        raise RuntimeError(f"tree_attention: backend {name!r} cannot run here: {reasons[name]}")
    return IMPLEMENTATIONS[name]
