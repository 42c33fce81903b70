"""Filters of the Triton kernels, which read only groups that may reach a bound, keep what the reference keeps."""

from __future__ import annotations

import math

import pytest
import torch
from cases import FULL

from specens_kernels import LogitMixture, Mixture, Sampling, target_logprobs

GROUP = 128
VOCAB = 8 * GROUP + 77  # two groups a block, and a lane of the search sees five of them
INF = math.inf
TOKENS = torch.arange(VOCAB)
IN_GROUP, NUMBER = TOKENS % GROUP, TOKENS // GROUP
NORMAL = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 3

ROWS = {
    "random": NORMAL,
    "ties across all groups": (TOKENS * 7 % 3).float(),
    "a lane of the largest values": torch.where(IN_GROUP == 5, 12 - NUMBER / 2, NORMAL),
    "one token a group": torch.where(IN_GROUP == NUMBER, NUMBER / 4, -INF),
    "excluded groups": torch.where(NUMBER % 3 == 1, NORMAL, -INF),
    "only the part of a group at the end": torch.where(NUMBER == 8, NORMAL, -INF),
    "infinite": torch.where((TOKENS == 300) | (TOKENS == 1090), INF, NORMAL),
    "nothing": torch.full([VOCAB], -INF),
}
FILTERS = torch.tensor(  # top_k, top_p, min_p
    [[1, 1, 0], [6, 1, 0], [700, 1, 0], [0, 0.3, 0], [0, 0.97, 0], [0, 1, 0.3], [40, 0.95, 0.05], [0, 0.9, 0.2]]
)
ENSEMBLES = {
    "one member": (None, torch.float16),
    "mixture": (Mixture((0.6, 0.4)), torch.bfloat16),
    "mixture of filtered members": (Mixture((0.6, 0.4), filter="members"), torch.float32),
    "logit mixture": (LogitMixture((1.0, -0.5)), torch.float32),
}


@pytest.mark.parametrize("ensemble", ENSEMBLES)
def test_rows_of_many_groups_keep_the_tokens_of_the_reference(ensemble):
    """Each row under one of the filters, or by make test-full under each."""
    mixed, dtype = ENSEMBLES[ensemble]
    rows = torch.stack(list(ROWS.values())).to(dtype)
    members = [rows] if mixed is None else [rows, rows.roll(1, 0)]
    first = list(ENSEMBLES).index(ensemble)
    for shift in range(first, first + (len(FILTERS) if FULL else 1)):
        top_k, top_p, min_p = FILTERS.roll(shift, 0).unbind(1)
        order = "vllm" if shift % 2 else "transformers"
        sampling = Sampling(0.9, top_k=top_k.long(), top_p=top_p, min_p=min_p, filter_order=order)
        expected = target_logprobs(members, ensemble=mixed, sampling=sampling, backend="reference")
        result = target_logprobs(members, ensemble=mixed, sampling=sampling, backend="triton")
        kept, wanted = result > -INF, expected > -INF
        assert torch.equal(kept, wanted), (shift, (kept != wanted).nonzero())
        torch.testing.assert_close(result[kept], expected[kept], atol=5e-5, rtol=1e-5)
