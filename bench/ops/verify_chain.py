"""verify_chain: a batch of rounds from raw logits to emitted tokens."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from torch import Tensor

import specens_kernels
from bench import bounds, peers
from bench.case import DTYPES, Case, Options, chosen_shapes
from bench.check import check_tokens
from bench.inputs import ACCEPTANCES, ChainInputs, bytes_of_needed_rows, chain_inputs

DRAFT_LEN = 5
FIXED_COST = (1, 16)  # nothing to read: what a call costs by itself
SHAPES = ((1, 32000), (1, 49152), (1, 262144), (8, 128256), (32, 151936))  # batch, vocab
# acceptance, whether the target is a mixture of two members whose first one drafted, shapes
SETTINGS = (
    ("natural", False, (FIXED_COST, *SHAPES)),
    ("all", False, SHAPES),
    ("natural", True, SHAPES),
)


def cases(options: Options) -> Iterator[Case]:
    """Temperature 1, no filter; one target with an outside drafter, or a mixture of two."""
    for dtype in options.dtypes:
        for acceptance, mixture, shapes in SETTINGS:
            for batch, vocab in chosen_shapes(options, shapes):
                inputs = chain_inputs(batch, vocab, DRAFT_LEN, ACCEPTANCES[acceptance], DTYPES[dtype], mixture=mixture)
                yield _case(options, inputs, acceptance, dtype)


def _case(options: Options, inputs: ChainInputs, acceptance: str, dtype: str) -> Case:
    batch, vocab = inputs.member_logits[0].shape[0], inputs.member_logits[0].shape[-1]
    arguments = _arguments(inputs)

    @cache
    def reference(request: int, shift: float) -> Tensor:
        one = inputs.request(request, shift)
        return specens_kernels.verify_chain(**_arguments(one), backend="reference").tokens[0]

    return Case(
        shape={"batch": batch, "vocab": vocab, "draft_len": DRAFT_LEN},
        setting={
            "target": "single" if inputs.draft_logits is not None else "mixture of 2",
            "acceptance": acceptance,
            "mean_accepted": round(float(inputs.num_accepted.double().mean()), 2),
        },
        dtype=dtype,
        run=lambda: specens_kernels.verify_chain(**arguments, backend=options.backend),
        result=lambda verdict: verdict.tokens,
        check=lambda tokens: check_tokens(tokens, reference),
        bounds=bounds.reading(inputs.all_logits),
        bytes_needed=bytes_of_needed_rows(inputs),
        rivals=peers.rivals("verify_chain", options, inputs),
    )


def _arguments(inputs: ChainInputs) -> dict[str, Any]:
    single = inputs.draft_logits is not None
    return {
        "member_logits": inputs.member_logits,
        "draft_tokens": inputs.draft_tokens,
        "ensemble": None if single else specens_kernels.Mixture(inputs.weights),
        "drafter": None if single else 0,
        "draft_logits": inputs.draft_logits,
        "uniforms": inputs.uniforms,
    }
