"""What operations return, and the status of a request."""

from __future__ import annotations

import enum
from typing import NamedTuple

from torch import Tensor


class Status(enum.IntFlag):
    """What was unusual about a request; bits of `Verdict.status` and `Draw.status`. 0 is a plain request."""

    OK = 0
    NAN_LOGITS = 1  # a used row holds NaN, which counts as -inf
    INFINITE_LOGITS = 2  # a used row holds +inf, which counts as the largest finite number
    NO_TOKEN = 4  # no token of the row has positive probability: nothing more was emitted
    MEMBER_WITHOUT_TOKEN = 8  # a weighted member of a Mixture has no token: the other weights were renormalised
    INVALID_DRAFT_TOKEN = 16  # a draft id is -1 or outside the vocabulary: the chain ended there
    INVALID_DRAFT_DISTRIBUTION = 32  # no usable draft distribution: it was treated as one-hot
    EMPTY_RESIDUAL = 64  # the residual is nothing but rounding: the next token was drawn from the target
    INVALID_PARAMETER = 128  # a per-request temperature, weight, length or uniform is out of range: nothing was emitted


class Verdict(NamedTuple):
    """What a batch of speculative steps emits.

    tokens: int64 [batch, draft_len + 1]: the accepted draft tokens, then the next token, then -1.
    num_accepted: int64 [batch], accepted draft tokens. num_tokens: int64 [batch], emitted tokens.
    next_token: int64 [batch], the recovered or the bonus token, -1 where there is none.
    logprobs: float32 [batch, draft_len + 1], of the emitted tokens, 0 in the padding; None unless asked for.
    status: int32 [batch], bits of `Status`.
    top_tokens: int64 [batch, draft_len + 1, top_logprobs], the most likely tokens where one was emitted, most likely
        first, -1 where there is none (left); None unless asked for.
    top_logprobs: float32, their log-probabilities, -inf where there is no token; None unless asked for.
    path: int64 [batch, max_levels], of a tree: the accepted nodes from the root down, then -1. None for a chain.
    Of a tree, draft_len is max_levels, the most nodes of a path.
    """

    tokens: Tensor
    num_accepted: Tensor
    num_tokens: Tensor
    next_token: Tensor
    logprobs: Tensor | None
    status: Tensor
    top_tokens: Tensor | None = None
    top_logprobs: Tensor | None = None
    path: Tensor | None = None


class Draw(NamedTuple):
    """One drawn token a request, or with `count` several.

    tokens: int64 [batch], -1 where no token has positive probability; with `count` [batch, count], best score first,
    then -1. logprobs: float32 like tokens (0 where there is no token) or None unless asked for. status: int32 [batch],
    bits of `Status`. top_tokens: int64 [batch, top_logprobs] and top_logprobs, float32: the most likely tokens, as in
    `Verdict`, or None unless asked for.
    """

    tokens: Tensor
    logprobs: Tensor | None
    status: Tensor
    top_tokens: Tensor | None = None
    top_logprobs: Tensor | None = None


class TreeMask(NamedTuple):
    """Which keys each node of a draft tree attends to, and where the node is.

    mask: in the layout that was asked for (see `tree_mask`). positions: int64 [batch, nodes], absolute positions; the
    first free one, prefix_len, for padding.
    """

    mask: Tensor
    positions: Tensor


class Compaction(NamedTuple):
    """What a cache holds after `compact_kv`.

    lengths: int64 [batch], slots in use: prefix_lens + the nodes that were kept. num_blocks: int64 [batch], the blocks
    of block_table that these slots take; None without block_table. status: int32 [batch]: `Status.INVALID_PARAMETER`
    for a request that was refused, of which no slot was moved and lengths is prefix_lens; else 0.
    """

    lengths: Tensor
    num_blocks: Tensor | None
    status: Tensor
