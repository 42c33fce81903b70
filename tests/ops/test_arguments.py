"""Bad input: every argument that cannot be served is named, with what was expected and what came."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import operator_arguments

from specens_kernels import (
    Contrastive,
    LogitMixture,
    Mixture,
    Sampling,
    sample,
    target_logprobs,
    verify_chain,
)

LOGITS = torch.zeros(2, 3, 5)
TOKENS = torch.zeros(2, 2, dtype=torch.int64)
SEEDS = torch.zeros(2, dtype=torch.int64)
UNIFORMS = torch.zeros(2, 3, dtype=torch.float64)
WORDS = torch.full((2, 3, 1), -1, dtype=torch.int32)
PAIR = [LOGITS, LOGITS]
HALVES = Mixture((0.5, 0.5))
OPERATIONS = [f"specens_kernels.ops.{name}" for name in ("verify_chain", "sample", "target_logprobs")]


def verify(**changes: Any) -> Any:
    arguments = {"member_logits": LOGITS, "draft_tokens": TOKENS, "seeds": SEEDS, "positions": SEEDS, **changes}
    return verify_chain(arguments.pop("member_logits"), arguments.pop("draft_tokens"), **arguments)


def draw(**changes: Any) -> Any:
    arguments = {"member_logits": LOGITS[:, 0], "seeds": SEEDS, "positions": SEEDS, **changes}
    return sample(arguments.pop("member_logits"), **arguments)


def score(**changes: Any) -> Any:
    arguments = {"member_logits": LOGITS, **changes}
    return target_logprobs(arguments.pop("member_logits"), **arguments)


WRONG_LOGITS: list[tuple[str, dict[str, Any]]] = [
    ("member_logits", {"member_logits": []}),
    ("member_logits", {"member_logits": [[0.0, 1.0]]}),
    ("member_logits", {"member_logits": 1.5}),
    ("member_logits", {"member_logits": torch.zeros(5)}),
    ("member_logits", {"member_logits": torch.zeros(2, 3, 5, 1)}),
    (r"member_logits\[0\]", {"member_logits": LOGITS.double()}),
    (r"member_logits\[0\]", {"member_logits": LOGITS.int()}),
    (r"member_logits\[0\]", {"member_logits": LOGITS[..., :0]}),
    (r"member_logits\[0\]", {"member_logits": torch.zeros(2, 3, 10)[..., ::2]}),
    (r"member_logits\[1\]", {"member_logits": [LOGITS, LOGITS[:1]], "ensemble": HALVES}),
    (r"member_logits\[1\]", {"member_logits": [LOGITS, LOGITS.to("meta")], "ensemble": HALVES}),
    (r"member_logits\[1\]", {"member_logits": [LOGITS, None], "ensemble": HALVES}),
]
WRONG_TARGETS: list[tuple[str, dict[str, Any]]] = [
    ("ensemble", {"member_logits": PAIR}),
    ("ensemble", {"member_logits": PAIR, "ensemble": "mixture"}),
    ("ensemble", {"member_logits": PAIR, "ensemble": (0.5, 0.5)}),
    ("weights", {"member_logits": PAIR, "ensemble": Mixture((0.2, 0.3, 0.5))}),
    ("weights", {"member_logits": LOGITS, "ensemble": HALVES}),
    ("weights", {"member_logits": [*PAIR, LOGITS], "ensemble": Contrastive(0.1)}),
    ("weights", {"member_logits": PAIR, "ensemble": Mixture(torch.full((3, 2), 0.5))}),
    ("weights", {"member_logits": PAIR, "ensemble": LogitMixture(torch.zeros(2, 3))}),
    ("weights", {"member_logits": PAIR, "ensemble": LogitMixture(torch.zeros(2, 2, device="meta"))}),
    ("sampling", {"sampling": None}),
    ("sampling", {"sampling": 0.7}),
    ("temperature", {"sampling": Sampling(torch.ones(3))}),
    ("temperature", {"sampling": Sampling(torch.ones(2, device="meta"))}),
    ("backend", {"backend": "fortran"}),
    ("backend", {"backend": ["cpp"]}),
]
WRONG_UNIFORMS: list[tuple[str, dict[str, Any]]] = [
    ("seeds", {"seeds": None}),
    ("seeds", {"seeds": None, "positions": None}),
    ("positions", {"positions": None}),
    ("seeds", {"seeds": 7}),
    ("seeds", {"seeds": SEEDS[:1]}),
    ("seeds", {"seeds": SEEDS.double()}),
    ("positions", {"positions": SEEDS[:, None]}),
    ("positions", {"positions": SEEDS.double()}),
    ("positions", {"positions": SEEDS.to("meta")}),
    ("uniforms", {"uniforms": UNIFORMS}),
]
OTHER_STEPS = (r"member_logits\[1\]", {"member_logits": [LOGITS, LOGITS[:, :2]], "ensemble": HALVES})
WRONG_ROUNDS: list[tuple[str, dict[str, Any]]] = [
    OTHER_STEPS,
    ("member_logits", {"member_logits": torch.zeros(2, 4, 5)}),
    ("member_logits", {"member_logits": torch.zeros(2, 1, 5)}),
    ("member_logits", {"member_logits": torch.zeros(2, 5)}),
    ("draft_tokens", {"draft_tokens": [[0, 1], [1, 0]]}),
    ("draft_tokens", {"draft_tokens": TOKENS.float()}),
    ("draft_tokens", {"draft_tokens": TOKENS[0]}),
    ("draft_tokens", {"draft_tokens": TOKENS[:1]}),
    ("draft_tokens", {"draft_tokens": TOKENS.to("meta")}),
    ("drafter", {"drafter": 1}),
    ("drafter", {"drafter": -1}),
    ("drafter", {"drafter": 0.0}),
    ("drafter", {"drafter": "first"}),
    ("drafter", {"drafter": TOKENS[:, :1]}),
    ("drafter", {"drafter": TOKENS.float()}),
    ("drafter", {"drafter": TOKENS.to("meta")}),
    ("drafter", {"drafter": 0, "draft_logits": LOGITS[:, :2]}),
    ("draft_logits", {"draft_logits": LOGITS}),
    ("draft_logits", {"draft_logits": LOGITS[0]}),
    ("draft_logits", {"draft_logits": LOGITS[:, :2].double()}),
    ("draft_logits", {"draft_logits": LOGITS[:, :2].to("meta")}),
    ("draft_logits", {"draft_logits": "member 0"}),
    ("draft_sampling", {"draft_sampling": 0.7}),
    ("draft_sampling.temperature", {"draft_sampling": Sampling(torch.ones(3))}),
    ("draft_lens", {"draft_lens": SEEDS[:1]}),
    ("draft_lens", {"draft_lens": SEEDS.double()}),
    ("draft_lens", {"draft_lens": 2}),
    ("draft_lens", {"draft_lens": SEEDS.to("meta")}),
    ("uniforms", {"seeds": None, "positions": None, "uniforms": UNIFORMS[:, :2]}),
    ("uniforms", {"seeds": None, "positions": None, "uniforms": UNIFORMS.long()}),
    ("uniforms", {"seeds": None, "positions": None, "uniforms": UNIFORMS.to("meta")}),
    ("uniforms", {"seeds": None, "positions": None, "uniforms": 0.5}),
]


def first_rows(changes: dict[str, Any]) -> dict[str, Any]:
    """The same mistake in logits [batch, vocab]."""

    def first(logits: Any) -> Any:
        if isinstance(logits, list):
            return [first(row) for row in logits]
        return logits[:, 0] if isinstance(logits, torch.Tensor) and logits.dim() == 3 else logits

    return {name: first(value) if name == "member_logits" else value for name, value in changes.items()}


def assert_named(argument: str, call: Callable[..., Any], changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^{argument}: expected .*got") as raised:
        call(**changes)
    assert len(str(raised.value)) < 500, "the message holds a whole tensor"


@pytest.mark.parametrize(("argument", "changes"), [*WRONG_LOGITS, *WRONG_TARGETS, *WRONG_UNIFORMS, *WRONG_ROUNDS])
def test_verify_chain_names_a_bad_argument(argument, changes):
    assert_named(argument, verify, changes)


@pytest.mark.parametrize(("argument", "changes"), [*WRONG_LOGITS, *WRONG_TARGETS, *WRONG_UNIFORMS])
def test_sample_names_a_bad_argument(argument, changes):
    assert_named(argument, draw, first_rows(changes))


@pytest.mark.parametrize(
    "random_numbers", [UNIFORMS, UNIFORMS[:1, 0], UNIFORMS[:, 0].long(), UNIFORMS[:, 0].to("meta"), 0.5]
)
def test_sample_names_bad_uniforms(random_numbers):
    assert_named("uniforms", draw, {"seeds": None, "positions": None, "uniforms": random_numbers})


@pytest.mark.parametrize(("argument", "changes"), [*WRONG_LOGITS, *WRONG_TARGETS, OTHER_STEPS])
def test_target_logprobs_names_a_bad_argument(argument, changes):
    assert_named(argument, score, changes)


@pytest.mark.parametrize(
    ("argument", "build"),
    [
        ("weights", lambda: Mixture((0.5, 0.6))),
        ("weights", lambda: Mixture(torch.full((999, 2), 0.4))),
        ("weights", lambda: LogitMixture(torch.full((999, 2), math.inf))),
        ("temperature", lambda: Sampling(-torch.ones(999))),
        ("top_k", lambda: Sampling(top_k=torch.full((999,), -2))),
        ("weights", lambda: Mixture((-0.5, 1.5))),
        ("weights", lambda: Mixture((math.nan, 0.5))),
        ("weights", lambda: Mixture((math.inf, 0.5))),
        ("weights", lambda: Mixture(())),
        ("weights", lambda: Mixture(0.5)),
        ("weights", lambda: Mixture(("a", "b"))),
        ("weights", lambda: Mixture(torch.tensor([[0.5, 0.6]]))),
        ("weights", lambda: Mixture(torch.tensor([[0.5, 0.5], [-0.5, 1.5]]))),
        ("weights", lambda: Mixture(torch.tensor([[math.nan, 0.5]]))),
        ("weights", lambda: Mixture(torch.tensor([0.5, 0.5]))),
        ("weights", lambda: Mixture(torch.tensor([[1, 0]]))),
        ("weights", lambda: LogitMixture((1.0, math.nan))),
        ("weights", lambda: LogitMixture(torch.tensor([[1.0, math.inf]]))),
        ("amateur_weight", lambda: Contrastive(math.nan)),
        ("plausibility", lambda: Contrastive(0.1, plausibility=0.0)),
        ("plausibility", lambda: Contrastive(0.1, plausibility=1.5)),
        ("plausibility", lambda: Contrastive(0.1, plausibility=math.nan)),
        ("temperature", lambda: Sampling(-0.1)),
        ("temperature", lambda: Sampling(math.nan)),
        ("temperature", lambda: Sampling(math.inf)),
        ("temperature", lambda: Sampling(torch.tensor([1.0, -1.0]))),
        ("temperature", lambda: Sampling(torch.tensor([1.0, math.nan]))),
        ("temperature", lambda: Sampling(torch.tensor(1.0))),
        ("temperature", lambda: Sampling(torch.tensor([1, 2]))),
        ("temperature", lambda: Sampling("warm")),
        ("filter_order", lambda: Sampling(filter_order="alphabetical")),
    ],
)
def test_an_object_of_the_api_names_what_it_cannot_mean(argument, build):
    assert_named(argument, build, {})


@pytest.mark.parametrize("call", [verify, draw])
def test_greedy_requests_need_no_random_numbers(call):
    result = call(seeds=None, positions=None, sampling=Sampling(temperature=0.0))
    assert (result.status == 0).all()


@pytest.mark.parametrize("operation", list(map(importlib.import_module, OPERATIONS)))
def test_the_operator_itself_refuses_logits_that_it_cannot_read(operation):
    call = {"verify_chain": verify, "sample": draw, "target_logprobs": score}[operation.__name__.rpartition(".")[2]]
    (members, *rest), options = operator_arguments(operation, lambda backend: call(backend=backend))
    with pytest.raises(ValueError, match=r"^member_logits: expected float32, bfloat16 or float16, got"):
        operation.IMPLEMENTATIONS["cpp"]([logits.double() for logits in members], *rest, **options)


@pytest.mark.parametrize("operation", list(map(importlib.import_module, OPERATIONS)))
def test_what_is_as_by_default_is_not_handed_over(operation):
    call = {"verify_chain": verify, "sample": draw, "target_logprobs": score}[operation.__name__.rpartition(".")[2]]
    _, options = operator_arguments(operation, lambda backend: call(backend=backend))
    defaults = {"sampling": Sampling(1.0, None, None, None), "ensemble": None, "processing": None, "allowed": None}
    assert list(operator_arguments(operation, lambda backend: call(backend=backend, **defaults))[1]) == list(options)
    assert set(options) <= {"random"}
