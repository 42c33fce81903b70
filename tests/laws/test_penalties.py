"""Logit processing against transformers' processors, a loop that counts, and arithmetic by hand."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor

from specens_kernels import Processing, target_logprobs

PROMPT, OUTPUT, DRAFTS = [[3, 5, 5, -1], [40, 1, 0, 2]], [[7, 7, -1], [3, 33, 3]], [[7, 3], [9, 9]]


def random_logits(*shape: int) -> Tensor:
    return 2 * torch.randn(shape, generator=torch.Generator().manual_seed(0))


def history(request: int, row: int) -> list[int]:
    return [token for token in (*OUTPUT[request], *DRAFTS[request][:row]) if 0 <= token < 33]


def score(logits: Tensor, backend: str, **processing: Any) -> Tensor:
    tables = {"prompt_tokens": torch.tensor(PROMPT), "output_tokens": torch.tensor(OUTPUT)}
    drafts = torch.tensor(DRAFTS)
    return target_logprobs(logits, processing=Processing(**(tables | processing)), draft_tokens=drafts, backend=backend)


@pytest.mark.parametrize("backend", ["reference", "cpp"])
@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_the_repetition_penalty_is_that_of_transformers(backend, penalty):
    logits = random_logits(2, 3, 33)
    result = score(logits, backend, repetition_penalty=penalty)
    for request in range(2):
        prompt = [token for token in PROMPT[request] if 0 <= token < 33]
        for row in range(3):
            before = torch.tensor([prompt + history(request, row)])
            scores = RepetitionPenaltyLogitsProcessor(penalty)(before, logits[request, row][None].clone())
            torch.testing.assert_close(result[request, row], scores[0].log_softmax(-1))


@pytest.mark.parametrize("backend", ["reference", "cpp"])
@pytest.mark.parametrize("least", [0, 1, 2, 5])
def test_the_end_is_held_back_as_in_transformers(backend, least):
    """Whose count starts at the prompt: the output and the drafts have to be counted off."""
    logits, written = random_logits(2, 3, 33), 4
    ends = [11, 12]
    result = score(logits, backend, min_tokens=least, end_tokens=torch.tensor(ends))
    for row in range(3):
        processor = MinNewTokensLengthLogitsProcessor(10, written + least, ends, device="cpu")
        scores = processor(torch.zeros(2, 10 + written + row, dtype=torch.int64), logits[:, row].clone())
        torch.testing.assert_close(result[:, row], scores.log_softmax(-1))


@pytest.mark.parametrize("backend", ["reference", "cpp"])
def test_frequency_and_presence_penalties_count_the_output_and_the_drafts_before_a_row(backend):
    logits = random_logits(2, 3, 33)
    frequency, presence = torch.tensor([0.5, -0.3]), torch.tensor([0.25, 1.5])
    result = score(logits, backend, frequency_penalty=frequency, presence_penalty=presence)
    for request in range(2):
        for row in range(3):
            scores = logits[request, row].clone()
            for token, count in Counter(history(request, row)).items():
                scores[token] -= frequency[request] * count + presence[request]
            torch.testing.assert_close(result[request, row], scores.log_softmax(-1))


@pytest.mark.parametrize("backend", ["reference", "cpp"])
def test_a_bias_is_added_for_each_time_that_its_token_is_listed(backend):
    logits = random_logits(2, 3, 33)
    bias = (torch.tensor([[4, 4, -1], [0, 33, 8]]), torch.tensor([[1.5, -0.5, 9.0], [-math.inf, 9.0, 2.0]]))
    expected = logits.clone()
    expected[0, :, 4] += 1.0
    expected[1, :, 0] = -math.inf
    expected[1, :, 8] += 2.0
    torch.testing.assert_close(score(logits, backend, logit_bias=bias), expected.log_softmax(-1))


@pytest.mark.parametrize("backend", ["reference", "cpp"])
def test_bias_comes_first_then_repetition_then_the_others_then_the_end_then_the_mask(backend):
    logits = torch.tensor([[1.0, -1.0, 0.5, 2.0, 0.0]])
    tokens = torch.tensor([[0, 1]])
    processing = Processing(
        logit_bias=(torch.tensor([[0, 1, 3]]), torch.tensor([[-3.0, 3.0, 50.0]])),
        repetition_penalty=2.0,
        frequency_penalty=0.5,
        presence_penalty=0.25,
        min_tokens=1,
        end_tokens=torch.tensor([3]),
        output_tokens=tokens,
    )
    result = target_logprobs(logits, processing=processing, backend=backend)
    expected = torch.tensor([[-2.0 * 2 - 0.75, 2.0 / 2 - 0.75, 0.5, -math.inf, 0.0]])
    torch.testing.assert_close(result, expected.log_softmax(-1))
    mask = torch.tensor([[0b11101]], dtype=torch.int32)
    result = target_logprobs(logits, processing=processing, allowed=mask, backend=backend)
    expected[0, 1] = -math.inf
    torch.testing.assert_close(result, expected.log_softmax(-1))


@pytest.mark.parametrize("backend", ["reference", "cpp"])
@pytest.mark.parametrize("words", [1, 2, 3])
def test_a_mask_allows_the_tokens_of_its_bits_and_none_beyond_its_words(backend, words):
    tokens = [token for token in (0, 31, 32, 39) if token < 32 * words]
    mask = torch.zeros(1, words, dtype=torch.int64)
    for token in tokens:
        mask[0, token // 32] |= 1 << (token % 32)
    mask = torch.where(mask >= 2**31, mask - 2**32, mask).int()  # bit 31 is the sign
    probabilities = target_logprobs(torch.zeros(1, 40), allowed=mask, backend=backend).exp()
    expected = torch.zeros(1, 40)
    expected[0, tokens] = 1 / len(tokens)
    torch.testing.assert_close(probabilities, expected)
