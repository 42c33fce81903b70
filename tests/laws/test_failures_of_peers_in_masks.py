"""What went wrong in other systems with masks, padded drafts and vocabularies, by symptom."""

from __future__ import annotations

import math

import pytest
import torch
from laws.test_failures_of_peers import emitted, random_numbers
from laws.test_failures_of_peers_in_parameters import CPU, LAST_UNIFORM, all_uniforms, of, tokens_of
from torch import Tensor

from specens_kernels import Status, verify_chain

pytestmark = pytest.mark.parametrize("backend", ["reference", "cpp"])


def bits(*masks: int) -> Tensor:
    """A mask of one word for each row of one request."""
    return torch.tensor([[[mask] for mask in masks]], dtype=torch.int32)


def test_a_padded_drafter_never_makes_a_probability_of_nan(backend):
    """A drafter with fewer tokens, and one whose padding is -inf, leave what only the target knows to the residual."""
    target = of((0.1,) * 10)
    narrow, padded = of((0.125,) * 8), of((0.125,) * 8 + (0.0,) * 4)
    for outside in (narrow, padded):
        arguments = {"draft_logits": outside, "uniforms": random_numbers((0.9, 0.6), device=CPU), "backend": backend}
        verdict = verify_chain(target, tokens_of(3), logprobs=True, **arguments)
        assert emitted(verdict) == [[9]]
        assert verdict.logprobs.isfinite().all()
        assert verdict.status.item() == 0


@pytest.mark.parametrize("count", [1, 3])
def test_padding_in_the_drafts_never_emits_more_than_the_chain_holds(backend, count):
    """A -1 must not read the last token's probability."""
    logits = of(*[(0.0, 0.0, 1.0)] * 4)
    chain = [2] * (3 - count) + [-1] * count
    verdict = verify_chain(logits, tokens_of(*chain), uniforms=all_uniforms(0.0, 4), backend=backend)
    assert verdict.num_tokens.item() == 4 - count
    assert verdict.tokens.tolist() == [[2] * (4 - count) + [-1] * count]


def test_the_output_has_the_width_of_the_longest_chain_whatever_was_accepted(backend):
    logits, offsets = torch.zeros(4, 5), torch.tensor([0, 3, 4])
    arguments = {"row_offsets": offsets, "uniforms": torch.full((2, 7), 0.9), "backend": backend}
    verdict = verify_chain(logits, torch.zeros(2, dtype=torch.int64), max_draft_len=6, logprobs=True, **arguments)
    assert verdict.tokens.shape == verdict.logprobs.shape == (2, 7)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_draft_that_the_mask_of_its_row_forbids_is_rejected_there(backend, index):
    """Not an error, and not earlier: the next token is drawn under the same mask."""
    logits, masks = of(*[(0.25,) * 4] * 4), [0b1111] * 4
    masks[index] = 0b0110
    arguments = {"allowed": bits(*masks), "logprobs": True, "backend": backend}
    verdict = verify_chain(logits, tokens_of(0, 0, 0), uniforms=all_uniforms(0.0, 4), **arguments)
    assert emitted(verdict) == [[0] * index + [1]]
    assert verdict.status.item() == 0
    assert verdict.logprobs[0, index].item() == pytest.approx(math.log(0.5), abs=1e-6)


def test_a_masked_draft_of_a_drafter_that_knew_no_mask_leaves_a_residual_under_the_mask(backend):
    """Target (.25, .75) of tokens 1 and 2, drafts (.4, .35, .25): the residual is token 2 alone."""
    target, outside = of((0.6, 0.1, 0.3)), of((0.4, 0.35, 0.25))
    for uniform in (0.0, 0.5, LAST_UNIFORM):
        verdict = verify_chain(
            target,
            tokens_of(0),
            draft_logits=outside,
            process_drafts=False,
            allowed=bits(0b110),
            uniforms=random_numbers((0.0, uniform), device=CPU),
            backend=backend,
        )
        assert emitted(verdict) == [[2]]


@pytest.mark.parametrize("packed", [False, True])
def test_rows_behind_a_padded_draft_keep_their_masks(backend, packed):
    """Three drafts were scheduled and one came: the token after it is drawn under the mask of its row, not unmasked."""
    logits, masks = of(*[(0.125,) * 8] * 4), bits(-1, 0b01000000, 0b1, 0b1)
    arguments = {"uniforms": all_uniforms(0.05, 4), "backend": backend}
    if packed:
        arguments |= {"row_offsets": torch.tensor([0, 4]), "max_draft_len": 3, "allowed": masks[0]}
        verdict = verify_chain(logits[0], tokens_of(5, -1, -1)[0], **arguments)
    else:
        verdict = verify_chain(logits, tokens_of(5, -1, -1), allowed=masks, **arguments)
    assert emitted(verdict) == [[5, 6]]


def test_a_mask_with_a_row_too_many_is_refused_by_name(backend):
    logits, uniform_row = of(*[(0.5, 0.5)] * 2), all_uniforms(0.5, 2)
    with pytest.raises(ValueError, match=r"^allowed: expected shape \[1, 2, \*\], got \[1, 3, 1\]"):
        verify_chain(logits, tokens_of(0), allowed=bits(1, 1, 1), uniforms=uniform_row, backend=backend)
    arguments = {"row_offsets": torch.tensor([0, 2]), "max_draft_len": 1, "uniforms": uniform_row}
    with pytest.raises(ValueError, match=r"^allowed: expected shape \[2, \*\], got \[3, 1\]"):
        verify_chain(logits[0], torch.tensor([0]), allowed=bits(1, 1, 1)[0], backend=backend, **arguments)


def test_a_suffix_that_a_grammar_refuses_is_cut_by_its_length_and_the_next_token_is_the_targets(backend):
    """Not a residual: the drafts after the cut were never tested."""
    logits, outside = of(*[(0.5, 0.5)] * 4), of(*[(0.0, 1.0)] * 3)
    verdict = verify_chain(
        logits,
        tokens_of(1, 1, 1),
        draft_logits=outside,
        draft_lens=torch.tensor([1]),
        uniforms=torch.tensor([[0.1, 0.9, 0.9, 0.9]]),
        backend=backend,
    )
    assert emitted(verdict) == [[1, 1]]
    assert verdict.status.item() == Status.OK


def test_accepted_tokens_are_the_leading_ones_and_are_not_the_emitted_ones(backend):
    """A draft that would pass after a rejected one does not count."""
    logits = of((0.9, 0.1), (0.1, 0.9), (0.9, 0.1), (0.5, 0.5))
    verdict = verify_chain(logits, tokens_of(0, 0, 0), uniforms=all_uniforms(0.5, 4), backend=backend)
    assert (verdict.num_accepted.item(), verdict.num_tokens.item()) == (1, 2)
    bare = verify_chain(logits[:, :3], tokens_of(0, 1, 0), uniforms=all_uniforms(0.5, 4), backend=backend)
    assert (bare.num_accepted.item(), bare.num_tokens.item(), bare.next_token.item()) == (3, 3, -1)
