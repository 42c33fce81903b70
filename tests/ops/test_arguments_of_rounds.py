"""Bad processing, masks, packed rows, slots, rules and reports: each argument is named, with what was expected."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ops.test_arguments import LOGITS, SEEDS, TOKENS, UNIFORMS, WORDS, assert_named, draw, score, verify

from specens_kernels import Processing, Sampling, Synthetic, Typical

META = torch.device("meta")
ONES = torch.ones(2)
IDS = torch.zeros(2, 3, dtype=torch.int64)
BIAS = (IDS, torch.zeros(2, 3))
ROWS, OFFSETS, PACKED = LOGITS.flatten(0, 1), torch.tensor([0, 3, 6]), TOKENS.flatten()


def with_end(**fields: Any) -> Processing:
    return Processing(end_tokens=torch.tensor([1]), **fields)


WRONG_OBJECTS = [
    ("logit_bias", lambda: Processing(logit_bias=IDS)),
    ("logit_bias", lambda: Processing(logit_bias=[IDS, IDS.float()])),
    ("logit_bias", lambda: Processing(logit_bias=(IDS,))),
    ("logit_bias", lambda: Processing(logit_bias=(IDS, None))),
    ("logit_bias", lambda: Processing(logit_bias={3: -100.0})),
    (r"logit_bias\[0\]", lambda: Processing(logit_bias=(IDS.float(), IDS.float()))),
    (r"logit_bias\[0\]", lambda: Processing(logit_bias=(IDS[0], IDS[0].float()))),
    (r"logit_bias\[0\]", lambda: Processing(logit_bias=([[1]], IDS.float()))),
    (r"logit_bias\[1\]", lambda: Processing(logit_bias=(None, IDS.float()))),
    (r"logit_bias\[1\]", lambda: Processing(logit_bias=(IDS, IDS))),
    (r"logit_bias\[1\]", lambda: Processing(logit_bias=(IDS, IDS[:, :2].float()))),
    (r"logit_bias\[1\]", lambda: Processing(logit_bias=(IDS, torch.full((2, 3), math.inf)))),
    (r"logit_bias\[1\]", lambda: Processing(logit_bias=(IDS, torch.full((2, 3), math.nan)))),
    *[
        (name, lambda name=name, value=value: Processing(**{name: value}))
        for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")
        for value in (
            math.nan,
            math.inf,
            -math.inf,
            None,
            "much",
            torch.tensor(1.0),
            IDS,
            torch.tensor([1.0, math.nan]),
        )
    ],
    ("repetition_penalty", lambda: Processing(repetition_penalty=0.0)),
    ("repetition_penalty", lambda: Processing(repetition_penalty=-1.0)),
    ("repetition_penalty", lambda: Processing(repetition_penalty=torch.tensor([1.0, 0.0]))),
    ("min_tokens", lambda: with_end(min_tokens=1.5)),
    ("min_tokens", lambda: with_end(min_tokens=True)),
    ("min_tokens", lambda: with_end(min_tokens=None)),
    ("min_tokens", lambda: with_end(min_tokens=ONES)),
    ("min_tokens", lambda: with_end(min_tokens=torch.tensor(3))),
    ("end_tokens", lambda: Processing(min_tokens=1)),
    ("end_tokens", lambda: Processing(min_tokens=torch.tensor([0, 0]))),
    ("end_tokens", lambda: Processing(end_tokens=2)),
    ("end_tokens", lambda: Processing(end_tokens=[2])),
    ("end_tokens", lambda: Processing(end_tokens=torch.tensor(2))),
    ("end_tokens", lambda: Processing(end_tokens=ONES)),
    ("prompt_tokens", lambda: Processing(prompt_tokens=[[1]])),
    ("prompt_tokens", lambda: Processing(prompt_tokens=torch.tensor([1, 2]))),
    ("output_tokens", lambda: Processing(output_tokens=ONES[None])),
    ("output_tokens", lambda: Processing(output_tokens=IDS[None])),
    ("acceptance_rates", lambda: Synthetic(1.5)),
    ("acceptance_rates", lambda: Synthetic(-0.1)),
    ("acceptance_rates", lambda: Synthetic(math.nan)),
    ("acceptance_rates", lambda: Synthetic((0.5, 1.5))),
    ("acceptance_rates", lambda: Synthetic("high")),
    ("acceptance_rates", lambda: Synthetic(None)),
    ("acceptance_rates", lambda: Synthetic((0.5, None))),
    ("acceptance_rates", lambda: Synthetic((0.5, torch.tensor([0.5])))),
    ("threshold", lambda: Typical(torch.tensor([0.5]))),
    ("alpha", lambda: Typical(0.5, torch.tensor([0.5]))),
    ("threshold", lambda: Typical(None)),
]


@pytest.mark.parametrize(("argument", "build"), WRONG_OBJECTS)
def test_an_object_of_the_api_names_what_it_cannot_mean(argument, build):
    assert_named(argument, build, {})


WRONG_TARGETS: list[tuple[str, dict[str, Any]]] = [
    ("processing", {"processing": "penalties"}),
    ("processing", {"processing": {"repetition_penalty": 1.3}}),
    ("processing", {"processing": Sampling()}),
    (r"logit_bias\[0\]", {"processing": Processing(logit_bias=(IDS[:1], BIAS[1][:1]))}),
    (r"logit_bias\[0\]", {"processing": Processing(logit_bias=(IDS.to(META), BIAS[1]))}),
    (r"logit_bias\[1\]", {"processing": Processing(logit_bias=(IDS, BIAS[1].to(META)))}),
    ("repetition_penalty", {"processing": Processing(repetition_penalty=torch.ones(3))}),
    ("frequency_penalty", {"processing": Processing(frequency_penalty=torch.ones(1))}),
    ("presence_penalty", {"processing": Processing(presence_penalty=ONES.to(META))}),
    ("min_tokens", {"processing": with_end(min_tokens=torch.zeros(3, dtype=torch.int64))}),
    ("min_tokens", {"processing": with_end(min_tokens=SEEDS.to(META))}),
    ("end_tokens", {"processing": Processing(end_tokens=IDS[:1])}),
    ("end_tokens", {"processing": Processing(end_tokens=IDS.to(META))}),
    ("prompt_tokens", {"processing": Processing(prompt_tokens=torch.zeros(6, 3, dtype=torch.int64))}),
    ("prompt_tokens", {"processing": Processing(prompt_tokens=IDS.to(META))}),
    ("output_tokens", {"processing": Processing(output_tokens=IDS[:1])}),
    ("allowed", {"allowed": torch.ones(2, 3, 5, dtype=torch.bool)}),
    ("allowed", {"allowed": WORDS.long()}),
    ("allowed", {"allowed": WORDS[:1]}),
    ("allowed", {"allowed": WORDS[..., :0]}),
    ("allowed", {"allowed": torch.zeros(2, 3, 4, dtype=torch.int32)[..., ::2]}),
    ("allowed", {"allowed": WORDS.to(META)}),
    ("allowed", {"allowed": [1, 2]}),
    ("allowed", {"allowed": 1}),
]
WRONG_REPORTS: list[tuple[str, dict[str, Any]]] = [
    ("logprobs", {"logprobs": "processed"}),
    ("logprobs", {"logprobs": None}),
    ("logprobs", {"logprobs": 3}),
    ("logprobs", {"logprobs": ONES}),
    ("top_logprobs", {"top_logprobs": -1}),
    ("top_logprobs", {"top_logprobs": 1.0}),
    ("top_logprobs", {"top_logprobs": True}),
    ("top_logprobs", {"top_logprobs": None}),
    ("top_logprobs", {"top_logprobs": SEEDS}),
    ("top_logprobs", {"top_logprobs": torch.tensor(1)}),
    ("top_logprobs", {"top_logprobs": torch.tensor(1.0)}),
]
KEPT = torch.zeros(4, 2, 5)
PACKED_ROUND = {"member_logits": ROWS, "draft_tokens": PACKED, "row_offsets": OFFSETS, "max_draft_len": 2}
WRONG_ROUNDS: list[tuple[str, dict[str, Any]]] = [
    ("allowed", {"allowed": WORDS[:, :2]}),
    ("allowed", {"allowed": WORDS[:, 0]}),
    ("max_draft_len", {"max_draft_len": 3}),
    ("draft_slots", {"draft_slots": SEEDS}),
    ("draft_slots", {"draft_slots": SEEDS[:1], "draft_logits": KEPT}),
    ("draft_slots", {"draft_slots": SEEDS.float(), "draft_logits": KEPT}),
    ("draft_slots", {"draft_slots": SEEDS.to(META), "draft_logits": KEPT}),
    ("draft_slots", {"draft_slots": 1, "draft_logits": KEPT}),
    ("draft_logits", {"draft_slots": SEEDS, "draft_logits": KEPT[:, :1]}),
    ("draft_logits", {"draft_slots": SEEDS, "draft_logits": KEPT[0]}),
    ("draft_logits", {"draft_slots": SEEDS, "draft_logits": KEPT.double()}),
    ("drafter", {"draft_slots": SEEDS, "draft_logits": KEPT, "drafter": 0}),
    ("out", {"out": [TOKENS]}),
    ("out", {"out": True}),
    ("rule", {"rule": "synthetics"}),
    ("rule", {"rule": 0.8}),
    ("acceptance_rates", {"rule": Synthetic((0.5,))}),
    ("acceptance_rates", {"rule": Synthetic((0.5, 0.5, 0.5))}),
    ("seeds", {"rule": "synthetic", "sampling": Sampling(0.0), "seeds": None, "positions": None}),
]
WRONG_PACKED_ROUNDS: list[tuple[str, dict[str, Any]]] = [
    ("member_logits", {"member_logits": LOGITS}),
    ("row_offsets", {"row_offsets": OFFSETS.float()}),
    ("row_offsets", {"row_offsets": OFFSETS[None]}),
    ("row_offsets", {"row_offsets": OFFSETS[:0]}),
    ("row_offsets", {"row_offsets": OFFSETS.to(META)}),
    ("row_offsets", {"row_offsets": [0, 3, 6]}),
    ("max_draft_len", {"max_draft_len": None}),
    ("max_draft_len", {"max_draft_len": -1}),
    ("max_draft_len", {"max_draft_len": True}),
    ("max_draft_len", {"max_draft_len": 2.0}),
    ("max_draft_len", {"max_draft_len": torch.tensor(2)}),
    ("max_draft_len", {"draft_tokens": TOKENS, "max_draft_len": 3}),
    ("draft_lens", {"draft_lens": SEEDS}),
    ("draft_tokens", {"draft_tokens": PACKED[:3]}),
    ("draft_tokens", {"draft_tokens": PACKED.float()}),
    ("draft_tokens", {"draft_tokens": PACKED.to(META)}),
    ("draft_tokens", {"draft_tokens": TOKENS[:1], "max_draft_len": None}),
    ("draft_tokens", {"draft_tokens": [0, 1, 0, 1]}),
    ("drafter", {"drafter": TOKENS}),
    ("draft_logits", {"draft_logits": KEPT[:2]}),
    ("draft_logits", {"draft_logits": ROWS}),
    ("draft_slots", {"draft_logits": KEPT, "draft_slots": torch.zeros(4, dtype=torch.int64)}),
    ("draft_logits", {"draft_logits": KEPT, "draft_slots": SEEDS, "max_draft_len": 3}),
    ("allowed", {"allowed": WORDS}),
    ("allowed", {"allowed": WORDS[0]}),
    ("temperature", {"sampling": Sampling(torch.ones(6))}),
    ("draft_sampling.temperature", {"draft_sampling": Sampling(torch.ones(4))}),
    ("output_tokens", {"processing": Processing(output_tokens=torch.zeros(6, 1, dtype=torch.int64))}),
    ("uniforms", {"seeds": None, "positions": None, "uniforms": UNIFORMS[:, :2]}),
    ("acceptance_rates", {"rule": Synthetic((0.5,))}),
]


def first_row(changes: dict[str, Any]) -> dict[str, Any]:
    """The same mistake in a mask [batch, words]."""
    mask = changes.get("allowed")
    return changes | {"allowed": mask[:, 0]} if isinstance(mask, torch.Tensor) else changes


@pytest.mark.parametrize(("argument", "changes"), [*WRONG_TARGETS, *WRONG_REPORTS, *WRONG_ROUNDS])
def test_verify_chain_names_a_bad_argument(argument, changes):
    assert_named(argument, verify, changes)


@pytest.mark.parametrize(("argument", "changes"), WRONG_PACKED_ROUNDS)
def test_verify_chain_names_a_bad_argument_of_packed_rows(argument, changes):
    verify(**PACKED_ROUND)
    assert_named(argument, verify, PACKED_ROUND | changes)


@pytest.mark.parametrize(("argument", "changes"), [*WRONG_TARGETS, *WRONG_REPORTS])
def test_sample_names_a_bad_argument(argument, changes):
    assert_named(argument, draw, first_row(changes))


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        *WRONG_TARGETS,
        ("draft_tokens", {"draft_tokens": TOKENS[:, :1]}),
        ("draft_tokens", {"draft_tokens": TOKENS[:1]}),
        ("draft_tokens", {"draft_tokens": TOKENS.float()}),
        ("draft_tokens", {"draft_tokens": TOKENS[0]}),
        ("draft_tokens", {"draft_tokens": TOKENS.to(META)}),
        ("draft_tokens", {"draft_tokens": [[0, 1], [1, 0]]}),
    ],
)
def test_target_logprobs_names_a_bad_argument(argument, changes):
    assert_named(argument, score, changes)


@pytest.mark.parametrize("mask", [1, [1, 2], torch.tensor(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)])
def test_target_logprobs_of_one_row_names_a_bad_mask(mask):
    assert_named("allowed", score, {"member_logits": LOGITS[:, 0], "allowed": mask})
