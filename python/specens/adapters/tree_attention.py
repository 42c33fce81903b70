"""Draft trees in the models of transformers: the attention implementation "specens_tree", registered by the import."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer, StaticLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from specens_kernels import tree_attention, tree_mask
from specens_kernels.backend import backend_for

NAME = "specens_tree"
LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer)  # of caches; exactly these, not what derives from them
LAYER_TYPES = ("full_attention", "sliding_attention")
UNSERVED = ("softcap", "s_aux", "position_bias")  # what some models add to the scores


@dataclass
class _Draft:
    """The trees that are being scored. num_layers: how many attention layers have scored them."""

    parents: Tensor
    num_nodes: Tensor | None
    num_padding: Tensor | None
    prefix_len: int
    num_layers: int = 0


_CURRENT: ContextVar[_Draft | None] = ContextVar("specens_draft_tree", default=None)


@contextmanager
def draft_tree(
    parents: Tensor, cache: Cache, *, num_nodes: Tensor | None = None, num_padding: Tensor | None = None
) -> Iterator[Tensor]:
    """Within it, a forward takes the tokens it is fed as the nodes of draft trees, a tree a request, after the cache.

    parents, num_nodes: as in `specens_kernels.tree_attention`, on the model's device. cache: the one that the forward
    gets, with the committed tokens. num_padding: int64 or int32 [batch], slots of padding on the left of each request,
    which the forwards before masked by their attention_mask; this one gets none.
    Yields the position ids of the nodes, int64 [batch, nodes], for the forward:

        model.set_attn_implementation("specens_tree")  # once; outside draft_tree it is "sdpa"
        with draft_tree(parents, cache) as position_ids:
            logits = model(tokens, position_ids=position_ids, cache=cache).logits  # past_key_values= in older releases

    logits[:, i] are those of a plain forward at the end of node i's path. The forward leaves the keys of all nodes in
    the cache; taking back the rejected ones is the caller's.
    Raises ValueError for what cannot be served: a cache layer or a kind of attention other than full or sliding, an
    attention mask, another number of tokens than nodes; RuntimeError where no layer used this attention.
    """
    prefix_len = _prefix_len(cache)
    _check_integers("parents", parents, 2)
    if num_padding is not None:
        _check_integers("num_padding", num_padding, 1)
    prefix_lens = torch.full(parents.shape[:1], prefix_len, device=parents.device)
    prefix_lens = prefix_lens if num_padding is None else prefix_lens - num_padding
    backend = backend_for("tree_mask", parents)
    positions = tree_mask(parents, prefix_lens, layout="tree", num_nodes=num_nodes, backend=backend).positions
    draft = _Draft(parents, num_nodes, num_padding, prefix_len)
    token = _CURRENT.set(draft)
    try:
        yield positions
    finally:
        _CURRENT.reset(token)
    if draft.num_layers == 0:
        raise RuntimeError(f'no layer scored the tree; is model.set_attn_implementation("{NAME}") missing?')


def _check_integers(argument: str, value: Any, dims: int) -> None:
    if not isinstance(value, Tensor) or value.dim() != dims or value.dtype not in (torch.int64, torch.int32):
        got = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{argument}: expected a tensor of integers of {dims} dimensions, got {got}")


def _prefix_len(cache: Cache) -> int:
    if not isinstance(cache, Cache):
        raise ValueError(f"cache: expected a Cache of transformers, got {type(cache).__name__}")
    for layer in cache.layers:
        if type(layer) not in LAYERS:
            raise ValueError(f"cache: expected layers of full or sliding attention, got {type(layer).__name__}")
    return int(cache.get_seq_length())


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """What a layer calls, with the keys and values of its whole cache; returns [batch, nodes, heads, dim]."""
    draft = _CURRENT.get()
    if draft is None:
        arguments |= {"scaling": scaling, "dropout": dropout}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **arguments)
    nodes = draft.parents.shape[1]
    if query.shape[2] != nodes:
        raise ValueError(f"parents: expected a node for each of the {query.shape[2]} tokens fed, got {nodes}")
    _check_served(module, attention_mask, dropout, arguments)
    window = _window(module, arguments)
    # A layer with a window may have dropped the start of the prefix: then all it holds before the tree is prefix.
    kept = draft.prefix_len if window is None else min(draft.prefix_len, key.shape[2] - nodes)
    prefix_lens = torch.full(query.shape[:1], kept, device=query.device)
    starts = None if draft.num_padding is None else (draft.num_padding.long() - (draft.prefix_len - kept)).clamp(min=0)
    output = tree_attention(
        query,
        key,
        value,
        draft.parents,
        prefix_lens,
        num_nodes=draft.num_nodes,
        prefix_starts=starts,
        window=window,
        scale=scaling,
    )
    draft.num_layers += 1
    return output.transpose(1, 2).contiguous(), None


def _check_served(
    module: torch.nn.Module, attention_mask: Tensor | None, dropout: float, arguments: dict[str, Any]
) -> None:
    if attention_mask is not None:
        raise ValueError("attention_mask: expected None within draft_tree, got a tensor")
    if dropout != 0:
        raise ValueError(f"dropout: expected 0 within draft_tree, got {dropout}; is the model in training mode?")
    if not getattr(module, "is_causal", True):
        raise ValueError(f"model: expected causal attention within draft_tree, got {type(module).__name__}")
    for name in UNSERVED:
        if arguments.get(name) is not None:
            raise ValueError(f"model: expected attention without {name} within draft_tree, got {type(module).__name__}")


def _window(module: torch.nn.Module, arguments: dict[str, Any]) -> int | None:
    """How many positions back the layer sees, itself counted; None for all."""
    types, index = getattr(module.config, "layer_types", None), getattr(module, "layer_idx", None)
    kind = None if types is None or index is None else types[index]
    window = arguments.get("sliding_window")
    if kind not in (None, *LAYER_TYPES) or (kind == "sliding_attention" and window is None):
        raise ValueError(f"model: expected layers of full or sliding attention within draft_tree, got {kind}")
    return window


def mask(*sizes: Any, attention_mask: Tensor | None = None, **arguments: Any) -> Tensor | None:
    """What a model calls for the mask of its layers: that of "sdpa", and none of a tree."""
    if _CURRENT.get() is None:
        return sdpa_mask(*sizes, attention_mask=attention_mask, **arguments)
    if attention_mask is not None:
        raise ValueError("attention_mask: expected None within draft_tree, got a tensor")
    return None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, mask)
