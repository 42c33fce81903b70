"""FlashInfer's chain verification, by `verify_chain`: for callers who swap an import. FlashInfer is not needed."""

from __future__ import annotations

import torch
from torch import Tensor

from specens.adapters.shim_arguments import (
    FLOATS,
    INTEGERS,
    as_logits,
    check_deterministic,
    check_tensor,
    fail,
)
from specens_kernels import uniforms, verify_chain

SEED_DTYPES = (torch.int64, torch.uint64)
OFFSETS_OF_A_ROW = 2**40  # rows that share a seed are so far apart in it


def chain_speculative_sampling(
    draft_probs: Tensor,
    draft_token_ids: Tensor,
    target_probs: Tensor,
    maybe_output_accepted_token_num: Tensor | None = None,
    maybe_output_emitted_draft_token_num: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    seed: int | Tensor | None = None,
    offset: int | Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept a prefix of each request's draft tokens and draw the token after it, as `flashinfer.sampling` does.

    draft_probs: [batch, draft_len, vocab]. target_probs: [batch, draft_len + 1, vocab]. Any floating-point dtype, on
        any device; each row is normalised.
    draft_token_ids: int32 or int64 [batch, draft_len]. An id that is -1 or outside the vocabulary ends the chain.
    maybe_output_accepted_token_num, maybe_output_emitted_draft_token_num: int32 or int64 [batch]: counters that are
        added to, in place, and returned; new ones, int32, where None.
    deterministic: True or False; results are the same every time with either.
    generator: where the uniforms come from unless both seed and offset are given; None: torch's own for the device.
    seed, offset: integers or int64 or uint64 tensors [1] or [batch]: Philox's numbers, but not those of cuRAND. With a
        seed for each request its result depends on its own seed and offset only, else also on its place in the batch
        (offsets below 2^40).

    Returns (output_token_ids, accepted, emitted). output_token_ids: int32 [batch, draft_len + 1]: the accepted drafts,
    the recovered or bonus token, then -1. accepted counts the drafts that pass, each on its own, and emitted those that
    were emitted, without the last token, so emitted <= accepted.
    Raises ValueError naming the argument. A request of which nothing can be drawn gets -1 where its token would be;
    `verify_chain` also says why, takes logits and saves the copies that are made here.
    """
    check_tensor("draft_probs", draft_probs, (None, None, None), FLOATS)
    batch, draft_len, vocab = draft_probs.shape
    check_tensor("draft_token_ids", draft_token_ids, (batch, draft_len), INTEGERS)
    check_tensor("target_probs", target_probs, (batch, draft_len + 1, vocab), FLOATS)
    check_deterministic(deterministic)
    accepted = _counter("maybe_output_accepted_token_num", maybe_output_accepted_token_num, draft_probs)
    emitted = _counter("maybe_output_emitted_draft_token_num", maybe_output_emitted_draft_token_num, draft_probs)
    random_numbers = _uniforms(target_probs, generator, seed, offset)
    verdict = verify_chain(
        as_logits(target_probs), draft_token_ids, draft_logits=as_logits(draft_probs), uniforms=random_numbers
    )
    accepted.add_(_accepted_alone(draft_probs, draft_token_ids, target_probs, random_numbers, verdict.num_accepted))
    emitted.add_(verdict.num_accepted)
    return verdict.tokens.int(), accepted, emitted


def _counter(argument: str, given: Tensor | None, like: Tensor) -> Tensor:
    if given is None:
        return torch.zeros(like.shape[0], dtype=torch.int32, device=like.device)
    check_tensor(argument, given, (like.shape[0],), INTEGERS)
    return given


def _uniforms(
    target_probs: Tensor, generator: torch.Generator | None, seed: int | Tensor | None, offset: int | Tensor | None
) -> Tensor:
    """float64 [batch, draft_len + 1]."""
    batch, steps = target_probs.shape[:2]
    device = target_probs.device
    if seed is None or offset is None:
        return torch.rand(batch, steps, dtype=torch.float64, device=device, generator=generator)
    seeds, positions = (_words(name, value, batch, device) for name, value in (("seed", seed), ("offset", offset)))
    if len(seeds) != batch:
        positions = positions + torch.arange(batch, device=device) * OFFSETS_OF_A_ROW
    step = torch.arange(steps, device=device).repeat(batch)
    seeds, positions = (words.expand(batch).repeat_interleave(steps) for words in (seeds, positions))
    return uniforms(seeds, positions, step=step).view(batch, steps)


def _words(argument: str, value: int | Tensor, batch: int, device: torch.device) -> Tensor:
    """int64 [1] or [batch], the same 64 bits."""
    if isinstance(value, Tensor):
        if value.dim() != 1 or len(value) not in (1, batch) or value.dtype not in SEED_DTYPES:
            fail(argument, f"int64 or uint64 [1] or [{batch}]", f"{value.dtype} {list(value.shape)}")
        return value.view(torch.int64).to(device)
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**64:
        fail(argument, "an integer of 64 bits or a tensor", repr(value))
    return torch.tensor([value - 2**64 if value >= 2**63 else value], device=device)


def _accepted_alone(
    draft_probs: Tensor, draft_token_ids: Tensor, target_probs: Tensor, random_numbers: Tensor, num_accepted: Tensor
) -> Tensor:
    """How many drafts pass, each on its own: those of the prefix, and those after the first rejection that would."""
    draft_len, vocab = draft_probs.shape[1:]
    ids = draft_token_ids.long()
    known = (ids >= 0) & (ids < vocab)
    at_draft = torch.where(known, ids, 0)[..., None]
    draft_there = draft_probs.gather(2, at_draft)[..., 0].double()
    target_there = target_probs[:, :draft_len].gather(2, at_draft)[..., 0].double()
    after = torch.arange(draft_len, device=ids.device) > num_accepted[:, None]
    passes = known & after & (random_numbers[:, :draft_len] * draft_there < target_there)
    return num_accepted + passes.sum(1)
