"""The operators on a rank's slices, of C++ and Triton, and what they take; the best tokens of slices, found by them."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specens_kernels.arguments import Draft, SamplingArguments, Target
from specens_kernels.backend import CHOSEN_BACKEND, OPERATORS, TRITON_REASON, add_triton
from specens_kernels.distributed.shard import Shard, shifted
from specens_kernels.ensembles import EnsembleKind
from specens_kernels.ops.sample.gumbel import BLOCK
from specens_kernels.ops.target_logprobs.processing import Paths
from specens_kernels.parts.written_tokens import BUCKETS

TILE = 2048  # tokens whose sums C++ keeps


class Found(NamedTuple):
    """Of each row the best tokens here, as its slice counts them, their logits, and the slice's status."""

    values: Tensor  # float64 [batch, rows, count], -inf where there are fewer
    tokens: Tensor  # int64 [batch, rows, count]
    status: Tensor  # int64 [batch, rows]


class Part(NamedTuple):
    """A part of a slice, with everything that names tokens as the part counts them."""

    shard: Shard
    target: Target
    before: Tensor | Paths | None


def empty_best(member_logits: list[Tensor], *, count: int = 1, **_: Any) -> list[Tensor]:
    """Tensors of the shapes that `best_of_shard` gives."""
    rows = member_logits[0].shape[:2]
    found = [member_logits[0].new_empty((*rows, count), dtype=dtype) for dtype in (torch.float64, torch.int64)]
    return [*found, member_logits[0].new_empty(rows, dtype=torch.int32)]


def empty_numbers(member_logits: list[Tensor], draft_tokens: Tensor, **options: Any) -> list[Tensor]:
    """Of `chain_of_shard`; what it keeps is opaque."""
    first, mixture = member_logits[0], (options.get("ensemble") or [0])[0] == EnsembleKind.MIXTURE
    (batch, steps), parts = first.shape[:2], (len(member_logits) if mixture else 1) + 1
    shapes = (batch, steps, parts), (batch, steps, parts), (batch, steps), (batch, steps, 2)
    types = torch.float64, torch.float64, torch.int64, torch.int32
    found = [first.new_empty(shape, dtype=dtype) for shape, dtype in zip(shapes, types)]
    in_draft = 1 if options.get("parents") is None else draft_tokens.shape[1]
    looked = first.new_empty((batch, draft_tokens.shape[1], parts - 1 + in_draft), dtype=torch.float64)
    sizes = [logits.shape[-1] for logits in (*member_logits, *(options.get("draft_logits") or ()))]
    blocks = -(-max(sizes) // TILE)
    return [*found, looked, first.new_empty((batch, steps, parts, 1 + 2 * blocks), dtype=torch.float32)]


def num_blocks(state: Tensor) -> int:
    """In how many blocks of tokens a slice was read, of what `chain_of_shard` keeps of it."""
    in_cpp = state.dim() == 4  # [batch, steps, parts, 1 + 2 * blocks]; in Triton [rows, planes, blocks]
    return state.shape[-1] // 2 if in_cpp else state.shape[-1]


def empty_blocks(
    _logits: list[Tensor], _tokens: Tensor, row_of: Tensor, _shares: Tensor, _masses: Tensor, state: Tensor, **_: Any
) -> Tensor:
    """Of `residual_of_shard`."""
    return state.new_empty((*row_of.shape, num_blocks(state)), dtype=torch.float64)


def empty_logprobs(logits: list[Tensor], _tokens: Tensor, row_of: Tensor, *_: Any, **__: Any) -> Tensor:
    """Of `logprobs_of_shard`."""
    vocab = max(own.shape[-1] for own in logits)
    return row_of.new_empty((*row_of.shape, vocab), dtype=torch.float32)


def empty_scores(_logits: list[Tensor], _tokens: Tensor, row_of: Tensor, *_: Any, **__: Any) -> Tensor:
    """Of `entropies_of_shard`, `scores_of_shard` and `mass_of_drafts_of_shard`."""
    return row_of.new_empty(row_of.shape, dtype=torch.float64)


def empty_exceeding(_logits: list[Tensor], _tokens: Tensor, row_of: Tensor, *given: Any, **_: Any) -> Tensor:
    """Of `exceeding_of_shard`."""
    ratios: Tensor = given[-1]
    return ratios.new_empty((*row_of.shape, 2, ratios.shape[-1]))


def empty_samples(_logits: list[Tensor], _tokens: Tensor, *given: Any, **_: Any) -> list[Tensor]:
    """Of `samples_of_shard`."""
    largest: Tensor = given[3]
    return [largest.new_empty((*largest.shape, given[-2])), largest.new_empty((*largest.shape, 1 + given[-1]))]


def empty_entries(_logits: list[Tensor], _tokens: Tensor, *given: Any, **_: Any) -> list[Tensor]:
    """Of `entries_of_shard`."""
    largest: Tensor = given[3]
    shape = (*largest.shape, given[-1])
    keys = largest.new_empty(shape, dtype=torch.int64)
    return [largest.new_empty((*largest.shape, 1)), keys, largest.new_empty(shape), largest.new_empty(shape)]


def empty_top(_logits: list[Tensor], _tokens: Tensor, row_of: Tensor, *given: Any, **_: Any) -> list[Tensor]:
    """Of `top_of_shard` and `best_kept_of_shard`."""
    shape = (*row_of.shape, given[-1])
    return [row_of.new_empty(shape, dtype=torch.float64), row_of.new_empty(shape)]


def empty_buckets(_logits: list[Tensor], _tokens: Tensor, *given: Any, **_: Any) -> Tensor:
    """Of `buckets_of_shard`."""
    largest: Tensor = given[3]
    return largest.new_empty((*largest.shape, BUCKETS))


def empty_largest(
    _logits: list[Tensor],
    draft_tokens: Tensor,
    masses: Tensor,
    _state: Tensor,
    of_drafts: bool,
    count: int,
    **_: Any,
) -> list[Tensor]:
    """Of `largest_of_shard`."""
    batch, steps, parts = masses.shape
    rows = draft_tokens.shape[1] if of_drafts else steps * (parts - 1)
    return [masses.new_empty((batch, rows, count)), masses.new_empty((batch, rows, 1))]


def empty_draw(_logits: list[Tensor], _tokens: Tensor, row_of: Tensor, *_: Any, **__: Any) -> Tensor:
    """Of `draw_of_shard`."""
    return row_of.new_empty(len(row_of))


def empty_noise(_seeds: Tensor, _positions: Tensor, tokens: Tensor) -> Tensor:
    """A tensor of the shape that `gumbel_noise` gives."""
    return tokens.new_empty(tokens.shape, dtype=torch.float64)


HAS_OPERATORS = CHOSEN_BACKEND != "reference" and hasattr(torch.ops.specens, "best_of_shard")
if HAS_OPERATORS:
    OPERATORS.trace("gumbel_noise", empty_noise)  # which only C++ has
# Of Triton, with what gives tensors of the shapes of their results.
LAUNCHERS: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "best_of_shard": ("sample.triton_shard", "launch", empty_best),
    "chain_of_shard": ("verify_chain.triton_shard", "read", empty_numbers),
    "residual_of_shard": ("verify_chain.triton_shard", "residual", empty_blocks),
    "draw_of_shard": ("verify_chain.triton_shard", "draw", empty_draw),
    "buckets_of_shard": ("verify_chain.triton_shard_search", "buckets", empty_buckets),
    "samples_of_shard": ("verify_chain.triton_shard_search", "samples", empty_samples),
    "entries_of_shard": ("verify_chain.triton_shard_search", "entries", empty_entries),
    "largest_of_shard": ("verify_chain.triton_shard_search", "largest", empty_largest),
    "best_kept_of_shard": ("verify_chain.triton_shard_search", "best_kept", empty_top),
    "mass_of_drafts_of_shard": ("verify_chain.triton_shard_tree", "draft_masses", empty_scores),
    "exceeding_of_shard": ("verify_chain.triton_shard_tree", "exceeding", empty_exceeding),
    "entropies_of_shard": ("verify_chain.triton_shard_report", "entropies", empty_scores),
    "scores_of_shard": ("verify_chain.triton_shard_report", "scores", empty_scores),
    "top_of_shard": ("verify_chain.triton_shard_report", "top", empty_top),
    "logprobs_of_shard": ("verify_chain.triton_shard_report", "logprobs", empty_logprobs),
}
BY_TRITON: dict[str, str] = {}  # the names of the operators that have Triton's kernels


def _load(module: str, name: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(f"specens_kernels.ops.{module}"), name)


for _name, (_module, _launcher, _empty) in LAUNCHERS.items() if HAS_OPERATORS else ():
    OPERATORS.trace(_name, _empty)
    if TRITON_REASON is None:
        BY_TRITON[_name] = add_triton(_name, partial(_load, _module, _launcher), _empty, False)


def has_operators(like: Tensor) -> bool:
    """Whether the C++ is there for a tensor like this."""
    return HAS_OPERATORS and like.is_cpu


def takes_a_drafter_a_node(like: Tensor) -> bool:
    """Whether the operators read trees of which several members drafted nodes."""
    return has_operators(like)


def operator_for(name: str, like: Tensor) -> Callable[..., Any] | None:
    """An operator on slices, for tensors on this one's device; None: torch."""
    own = name if has_operators(like) else BY_TRITON.get(name) if like.is_cuda else None
    return None if own is None else getattr(torch.ops.specens, own)


def has_kernel(target: Target) -> bool:
    """Whether a kernel can find the best tokens; plausibility is for torch."""
    return operator_for("best_of_shard", target.member_logits[0]) is not None and target.plausibility == 0


def split_at_block(shard: Shard, target: Target, before: Tensor | Paths | None) -> tuple[Part | None, Part | None]:
    """The tokens before the first whole block of noise, and those from there on, where there are some.

    target: its `processing` is the shard's. The bit mask of the second part begins with it.
    """
    head = min(-shard.start % BLOCK, shard.width)
    first = None
    if head > 0:
        logits = [_columns(values, 0, head) for values in target.member_logits]
        first = Part(shard._replace(width=head), target._replace(member_logits=logits), before)
    if head == shard.width:
        return first, None
    logits = [_columns(values, head, shard.width) for values in target.member_logits]
    rest = shard._replace(start=shard.start + head, width=shard.width - head)
    moved = Shard(head, shard.sizes, shard.draft_size, rest.width, None)
    if isinstance(before, Paths):
        before = before._replace(tokens=moved.own(before.tokens))
    elif before is not None:
        before = moved.own(before)
    allowed = None
    if target.allowed is not None:
        allowed = target.allowed[..., rest.start // 32 :]
        allowed = allowed if allowed.shape[-1] > 0 else allowed.new_zeros(*allowed.shape[:-1], 1)
    own = target._replace(member_logits=logits, allowed=allowed, processing=shifted(moved, target.processing))
    return first, Part(rest, own, before)


def _columns(logits: Tensor, begin: int, end: int) -> Tensor:
    """A part of a slice, or a token that cannot be drawn where it is empty."""
    own = logits[..., begin:end]
    return own if own.shape[-1] > 0 else logits.new_full((*logits.shape[:-1], 1), -math.inf)


def parents_of(paths: Paths) -> Tensor:
    """int64 [batch, nodes], the node before each, -1 for the root; -2 for padding."""
    nodes = paths.tokens.shape[1]
    index = torch.arange(nodes, device=paths.tokens.device)
    above = paths.above[:, 1:]
    parents = torch.where(above & (index < index[:, None]), index, -1).amax(-1) if nodes > 0 else paths.tokens
    return torch.where(above.diagonal(dim1=1, dim2=2), parents, -2)


def best_by_kernel(part: Part, seeds: Tensor | None, positions: Tensor | None, count: int) -> Found:
    """The best tokens of a part that begins with a block of noise."""
    target, options = part.target, operator_options(part.target) | {"count": count}
    if isinstance(part.before, Paths):
        options |= {"draft_tokens": part.before.tokens.contiguous(), "parents": parents_of(part.before)}
    elif part.before is not None:
        options["draft_tokens"] = part.before
    if seeds is not None and positions is not None:
        options |= {"seeds": seeds, "positions": positions}
    operator = operator_for("best_of_shard", target.member_logits[0])
    assert operator is not None
    values, tokens, status = operator(target.member_logits, first_token=part.shard.start, **options)
    return Found(values, tokens, status.long())


def numbers_of(own: SamplingArguments) -> list[float]:
    """The sampling parameters of all requests."""
    return [own.temperature, float(own.top_k), own.top_p, own.min_p, float(own.min_p_first)]


def operator_options(target: Target, draft: Draft | None = None) -> dict[str, Any]:
    """What operators take of a target: `specens_kernels.arguments.target_of`, back; and of dense drafts."""
    own, edits = target.sampling, target.processing
    options: dict[str, Any] = {"sampling": numbers_of(own)}
    rows = [own.temperatures, own.top_ks, own.top_ps, own.min_ps, target.weight_rows]
    if draft is not None:
        of_draft = draft.sampling
        rows += [of_draft.temperatures, of_draft.top_ks, of_draft.top_ps, of_draft.min_ps]
        options |= {"drafter": draft.drafter, "drafters": draft.drafters, "draft_sampling": numbers_of(of_draft)}
        options["draft_logits"] = None if draft.logits is None else [draft.logits]
        options["process_drafts"] = bool(draft.processed)
    if any(value is not None for value in rows):
        options["rows"] = rows
    if target.allowed is not None:
        options["allowed"] = target.allowed
    if target.ensemble != EnsembleKind.SINGLE:
        weights = [] if target.weight_rows is not None else list(target.weights)
        options["ensemble"] = [float(target.ensemble), float(target.filter_members), target.plausibility, *weights]
    if edits.active:
        options["processing"] = [
            edits.repetition_penalty,
            edits.frequency_penalty,
            edits.presence_penalty,
            float(edits.min_tokens),
        ]
        options["processing_rows"] = [
            *(edits.repetition_penalties, edits.frequency_penalties, edits.presence_penalties, edits.min_tokens_rows),
            *(edits.bias_tokens, edits.bias_values, edits.end_tokens, edits.prompt_tokens, edits.output_tokens),
        ]
    return options
