"""The prefix by flash-attn, the tree by plain matrix products, merged by their log-sum-exps."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from specens_kernels.ops.tree_attention.parts import Part, fold, merge, read_tree, repeat_rows

DTYPES = (torch.float16, torch.bfloat16)
MAX_DIM = 256
OLDEST_GPU = (8, 0)


def _import() -> str | None:
    """Why flash-attn is not used, or None."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return "flash-attn runs on CUDA GPUs, and torch sees none"
    try:
        importlib.import_module("flash_attn").flash_attn_with_kvcache  # noqa: B018  version 4 has the name, not the function
    except (ImportError, OSError, RuntimeError, AttributeError) as error:  # of a build for another torch: any of these
        return f"flash-attn 2 cannot be imported: {error}"
    return None


REASON = _import()


def unsuited(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Why flash-attn does not take these, or None."""
    if REASON is not None:
        return REASON
    if query.device.type != "cuda" or torch.cuda.get_device_capability(query.device) < OLDEST_GPU:
        return f"flash-attn wants a CUDA device of compute capability 8.0 or more, not {query.device}"
    if query.dtype not in DTYPES:
        return f"flash-attn takes float16 and bfloat16, not {query.dtype}"
    dim = query.shape[3]
    if dim > MAX_DIM or dim % 8:
        return f"flash-attn takes multiples of 8 up to {MAX_DIM} as the size of a head, not {dim}"
    if key.stride(3) != 1 or value.stride(3) != 1:
        return "flash-attn wants key and value contiguous in their last dimension"
    return None


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parents: Tensor,
    prefix_lens: Tensor,
    num_nodes: Tensor | None,
    prefix_starts: Tensor | None,
    window: int,
    scale: float,
) -> Tensor:
    """As the reference. No value of prefix_lens is read by the host."""
    kv_heads = key.shape[1]
    group, tree = query.shape[1] // kv_heads, read_tree(parents, num_nodes, window)
    rows = fold(query, kv_heads)
    first_seen = torch.zeros_like(tree.depth) if prefix_starts is None else prefix_starts[:, None].expand_as(tree.depth)
    if window > 0:
        in_window = prefix_lens[:, None] + tree.depth + 1 - window
        first_seen = torch.minimum(torch.maximum(first_seen, in_window), prefix_lens[:, None])  # [batch, nodes]
        prefix = _windowed_prefix(query, key, value, prefix_lens, first_seen, scale)
    else:
        prefix = _prefix(rows, key, value, prefix_lens, prefix_starts, scale)
    sees_prefix = tree.follows_prefix & (first_seen < prefix_lens[:, None])
    own = _tree(rows, key, value, prefix_lens, repeat_rows(tree.sees_node, group), scale)
    result = merge(prefix, own, repeat_rows(sees_prefix, group))
    return result.to(query.dtype).reshape(query.shape).contiguous()


def _prefix(
    query: Tensor, key: Tensor, value: Tensor, prefix_lens: Tensor, prefix_starts: Tensor | None, scale: float
) -> Part:
    """Each row over the whole prefix. Where that is empty the log-sum-exp is +inf, and `merge` leaves it out."""
    leftpad = None if prefix_starts is None else prefix_starts.int()
    lengths = prefix_lens.int()
    output, log_sum_exp = _flash(query, key, value, cache_seqlens=lengths, cache_leftpad=leftpad, softmax_scale=scale)
    return Part(output.transpose(1, 2), log_sum_exp)


def _windowed_prefix(
    query: Tensor, key: Tensor, value: Tensor, prefix_lens: Tensor, first_seen: Tensor, scale: float
) -> Part:
    """Each node over the prefix from slot first_seen [batch, nodes] on.

    flash-attn counts windows by row, and siblings are rows of the same depth: so each node is a request of its own,
    that reads the cache of its tree from its first slot on.
    """
    (batch, heads, nodes, dim), kv_heads = query.shape, key.shape[1]
    output, log_sum_exp = _flash(
        query.transpose(1, 2).reshape(batch * nodes, heads, 1, dim),
        key,
        value,
        cache_seqlens=prefix_lens.int().repeat_interleave(nodes),
        cache_batch_idx=torch.arange(batch, device=query.device, dtype=torch.int32).repeat_interleave(nodes),
        cache_leftpad=first_seen.int().flatten(),
        softmax_scale=scale,
    )
    output = output.reshape(batch, nodes, heads, dim).transpose(1, 2)
    log_sum_exp = log_sum_exp.reshape(batch, nodes, heads).transpose(1, 2)
    return Part(fold(output, kv_heads), log_sum_exp.reshape(batch, kv_heads, -1))


def _flash(query: Tensor, key: Tensor, value: Tensor, **arguments: Tensor | float | None) -> tuple[Tensor, Tensor]:
    """flash-attn has heads after the sequence: output [batch, rows, heads, dim], log-sum-exp [batch, heads, rows]."""
    attend = importlib.import_module("flash_attn").flash_attn_with_kvcache
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return attend(query, key, value, causal=False, return_softmax_lse=True, **arguments)


def _tree(rows: Tensor, key: Tensor, value: Tensor, prefix_lens: Tensor, sees_node: Tensor, scale: float) -> Part:
    """Each row over its ancestors and itself (sees_node [batch, 1, rows, nodes]), in float32: trees are small."""
    slot = prefix_lens[:, None] + torch.arange(sees_node.shape[3], device=rows.device)
    slot = slot.clamp(0, key.shape[2] - 1)[:, None, :, None].expand(-1, key.shape[1], -1, key.shape[3])
    own_key, own_value = (cache.gather(2, slot).float() for cache in (key, value))
    scores = (rows.float() @ own_key.mT * scale).masked_fill(~sees_node, -torch.inf)
    return Part(scores.softmax(-1) @ own_value, scores.logsumexp(-1))
