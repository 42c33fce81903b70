"""Arguments at the edge of what they may be: every backend takes, refuses and means them alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specens_kernels import (
    Contrastive,
    LogitMixture,
    Processing,
    Sampling,
    Status,
    sample,
    target_logprobs,
    tree_mask,
    uniforms,
    verify_chain,
    verify_tree,
)

BACKENDS = ["reference", "cpp", "triton"]
LOGITS = torch.randn(2, 3, 9, generator=torch.Generator().manual_seed(0))
DRAFTS = torch.tensor([[1, 2], [3, 4]])
UNIFORMS = torch.full((2, 3), 0.5)
PACKED = {
    "member_logits": LOGITS.view(6, 9),
    "draft_tokens": DRAFTS.view(-1),
    "row_offsets": torch.tensor([0, 3, 6]),
    "max_draft_len": 2,
}
ROUND = {"member_logits": LOGITS, "draft_tokens": DRAFTS, "uniforms": UNIFORMS}
HUGE = (2**20 + 1, 2**31, 2**33, 2**40, 2**62, 2**63, -1, True, 1.0, "1")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_draft_len", HUGE),
        ("top_logprobs", HUGE),
        ("process_drafts", (1, 0, None, np.True_)),
        ("drafter", (2**63, -1, 1, True, 0.0)),
    ],
)
def test_a_number_that_is_none_is_named(backend: str, name: str, values: tuple):
    for value in values:
        for rule in ("token", "synthetic"):
            call = {**ROUND, **(PACKED if name == "max_draft_len" else {}), name: value}
            with pytest.raises(ValueError, match=f"^{name}: expected .*, got "):
                verify_chain(**call, rule=rule, backend=backend)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("top_k", lambda value: Sampling(top_k=value)),
        ("min_tokens", lambda value: Processing(min_tokens=value, end_tokens=DRAFTS)),
        ("step", lambda value: sample(LOGITS[:, 0], uniforms=UNIFORMS[:, 0], step=value)),
        ("stream", lambda value: sample(LOGITS[:, 0], uniforms=UNIFORMS[:, 0], stream=value)),
        ("stream", lambda value: uniforms(DRAFTS[0], DRAFTS[0], stream=value)),
        ("max_prefix", lambda value: tree_mask(DRAFTS - 5, DRAFTS[0], max_prefix=value)),
        ("window", lambda value: tree_mask(DRAFTS - 5, DRAFTS[0], max_prefix=9, window=value)),
        ("max_levels", lambda value: verify_tree(LOGITS, DRAFTS, DRAFTS - 5, uniforms=UNIFORMS, max_levels=value)),
    ],
)
def test_an_integer_that_operators_cannot_hold_is_named(name: str, call):
    for value in (2**63, -(2**63) - 1, 0.5, "1"):
        with pytest.raises(ValueError, match=f"^{name}: expected .*, got "):
            call(value)


@pytest.mark.parametrize("backend", ["reference", "cpp"])
def test_numbers_of_numpy_are_numbers(backend: str):
    asked = {"sampling": Sampling(temperature=np.float32(0.5), top_k=np.int64(5), top_p=np.float64(0.9))}
    plain = {"sampling": Sampling(temperature=0.5, top_k=5, top_p=0.9)}
    wanted = verify_chain(**ROUND, **plain, drafter=0, top_logprobs=2, backend=backend)
    ours = verify_chain(**ROUND, **asked, drafter=np.int64(0), top_logprobs=np.int32(2), backend=backend)
    assert all(torch.equal(one, other) for one, other in zip(ours[:8], wanted[:8], strict=True))
    packed = {**PACKED, "uniforms": UNIFORMS, "max_draft_len": np.int16(2)}
    assert torch.equal(
        verify_chain(**packed, backend=backend).tokens, verify_chain(**ROUND, backend="reference").tokens
    )


def test_float64_parameters_are_what_they_hold(backend: str):
    """Below and above float32's numbers, too."""
    for temperatures in ([1e-50, 1e39], [1e-320, 1e300], [0.0, float("inf")]):
        given = torch.tensor([1.0, 1.0], dtype=torch.float64)
        asked = {"sampling": Sampling(temperature=given), "uniforms": UNIFORMS[:, 0], "logprobs": True}
        given.copy_(torch.tensor(temperatures, dtype=torch.float64))
        wanted = sample(LOGITS[:, 0], backend="reference", **asked)
        ours = sample(LOGITS[:, 0], backend=backend, **asked)
        assert torch.equal(ours.tokens, wanted.tokens)
        assert torch.equal(ours.status, wanted.status)
        torch.testing.assert_close(ours.logprobs, wanted.logprobs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("below", [1e-300, 1e-9, 9e-7])
def test_a_top_p_that_sums_cannot_tell_from_1_is_off(backend: str, below: float):
    logits = torch.randn(2, 1, 300, generator=torch.Generator().manual_seed(1)) * 8
    off = target_logprobs(logits, backend=backend)
    for top_p in (1 - below, torch.full((2,), 1 - below, dtype=torch.float64)):
        assert torch.equal(
            target_logprobs(logits, sampling=Sampling(top_p=top_p), backend=backend) > -1e30, off > -1e30
        )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("sizes", [(5, 9), (9, 5), (2049, 17), (17, 2100)])
def test_what_lies_beyond_another_members_vocabulary_has_its_status(backend: str, bad: float, sizes: tuple[int, int]):
    members = [torch.zeros(1, size) for size in sizes]
    wider = members[sizes.index(max(sizes))]
    wider[0, -1] = bad
    for ensemble in (LogitMixture((1.0, 0.5)), LogitMixture((0.5, 1.0), 0.1)):
        asked = {"ensemble": ensemble, "uniforms": torch.tensor([0.5])}
        wanted = sample(members, backend="reference", **asked)
        assert sample(members, backend=backend, **asked).status == wanted.status
        assert wanted.status != Status.OK


@pytest.mark.parametrize("sizes", [(9, 14), (14, 9), (9, 9)])
@pytest.mark.parametrize("dead", [False, True])
def test_a_member_without_weight_may_tell_plausibility(backend: str, sizes: tuple[int, int], dead: bool):
    generator = torch.Generator().manual_seed(3)
    members = [torch.randn(4, size, generator=generator) * 2 for size in sizes]
    if dead:
        members[0].fill_(-torch.inf)
    for ensemble in (LogitMixture((0.0, 1.0), 0.2), LogitMixture(torch.tensor([[0.0, 1.0]] * 4), 0.2)):
        wanted = target_logprobs(members, ensemble=ensemble, backend="reference")
        ours = target_logprobs(members, ensemble=ensemble, backend=backend)
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)


def test_a_logit_that_processing_takes_beyond_float32_is_infinite(backend: str):
    logits = torch.tensor([[3e38, 0.0, 1.0], [-3e38, 0.0, 1.0], [3e38, 3e38, 1.0]])
    tokens = torch.zeros(3, 1, dtype=torch.int64)
    cases = [((bias,), penalty) for bias, penalty in ((3e38, 1.0), (-3e38, 2.0), (1e38, 1.0), (0.0, 1e-3))]
    if backend == "cpp":  # float32 kernels add and divide in float32: what is infinite on the way stays so
        cases += [((3e38,), 2.0), ((3e38, 3e38, -3e38), 1.0)]
    for bias, penalty in cases:
        values, listed = torch.tensor([bias] * 3), tokens.expand(3, len(bias))
        processing = Processing(logit_bias=(listed, values), repetition_penalty=penalty, prompt_tokens=tokens)
        asked = {"processing": processing, "uniforms": torch.tensor([0.3] * 3)}
        wanted = sample(logits, backend="reference", **asked)
        ours = sample(logits, backend=backend, **asked)
        assert torch.equal(ours.tokens, wanted.tokens), (bias, penalty)
        assert torch.equal(ours.status, wanted.status), (bias, penalty)


def test_plausibility_excludes_what_is_beyond_the_amateur(backend: str):
    members = [torch.randn(2, 7), torch.randn(2, 12)]
    asked = {"ensemble": Contrastive(0.5, 0.1)}
    wanted = target_logprobs(members, backend="reference", **asked)
    torch.testing.assert_close(target_logprobs(members, backend=backend, **asked), wanted, rtol=1e-5, atol=1e-5)
