"""SGLang's chain functions, against plain Python that says what they do, and their rules for unusable drafts."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import chisquare
from shim_models import MARGIN, UNTOUCHED, distributions, drawn
from specens.adapters.sglang import chain_block_speculative_sampling_triton, chain_speculative_sampling_triton

NAMES = ("predicts", "accept_index", "accept_token_num")


def chain_case(batch: int, slots: int, vocab: int, seed: int, zeros: float = 0.2) -> dict:
    """Arguments as SGLang passes them; drafts drawn from the draft distribution."""
    generator = torch.Generator().manual_seed(seed)
    draft = distributions(batch, slots, vocab, seed=seed + 1, zeros=zeros)
    target = (distributions(batch, slots, vocab, seed=seed + 2, zeros=zeros) + draft) / 2
    tokens = torch.multinomial(draft.view(-1, vocab), 1, generator=generator).view(batch, slots)
    return {
        "predicts": torch.full((batch * slots,), UNTOUCHED, dtype=torch.int32),
        "accept_index": torch.full((batch, slots), UNTOUCHED, dtype=torch.int32),
        "accept_token_num": torch.full((batch,), UNTOUCHED, dtype=torch.int32),
        "candidates": torch.cat([torch.zeros(batch, 1, dtype=torch.int64), tokens[:, : slots - 1]], dim=1),
        "retrive_index": torch.randperm(batch * slots, generator=generator).view(batch, slots),
        "retrive_next_token": None,
        "retrive_next_sibling": None,
        "uniform_samples": torch.rand(batch, slots, generator=generator),
        "uniform_samples_for_final_sampling": torch.rand(batch, generator=generator),
        "target_probs": target,
        "draft_probs": draft,
        "threshold_single": 1.0,
        "threshold_acc": 1.0,
        "deterministic": True,
    }


def model(case: dict, request: int, block: bool) -> tuple[list[int], int, float]:
    """The emitted tokens, the accepted drafts and the nearest tie, of drafts that are all usable."""
    target, draft = (case[name][request].double() for name in ("target_probs", "draft_probs"))
    tokens, random_numbers = case["candidates"][request, 1:].tolist(), case["uniform_samples"][request].tolist()
    margins, accepted, scale, ratio = [1.0], 0, 1.0, 1.0
    for step, token in enumerate(tokens):
        here, drafted = float(target[step, token]), float(draft[step, token])
        if not block:
            margins.append(abs(random_numbers[step] * drafted - here))
            if random_numbers[step] * drafted >= here:
                break
            accepted = step + 1
            continue
        ratio = min(1.0, ratio * here / drafted)
        left = (
            0.0 if step + 1 == len(tokens) else float((ratio * target[step + 1] - draft[step + 1]).clamp(min=0).sum())
        )
        below = ratio if step + 1 == len(tokens) else left / max(left + 1 - ratio, 1e-30)
        margins.append(abs(random_numbers[step] - below))
        if random_numbers[step] < below:
            accepted, scale = step + 1, ratio
    mass = target[accepted] if accepted == len(tokens) else scale * target[accepted] - draft[accepted]
    last = drawn(mass.clamp(min=0).tolist(), float(case["uniform_samples_for_final_sampling"][request]), margins)
    return [*tokens[:accepted], last], accepted, min(margins)


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize(("slots", "vocab"), [(5, 9), (2, 2), (1, 4), (9, 30)])
def test_a_chain_writes_what_the_kernel_writes(slots, vocab, block):
    case = chain_case(40, slots, vocab, seed=slots)
    chain_speculative_sampling_triton(**case, block_verification=block)
    near, total, predicts = 0, 0, torch.full_like(case["predicts"], UNTOUCHED)
    for request in range(40):
        tokens, accepted, margin = model(case, request, block)
        indices = case["retrive_index"][request]
        if margin < MARGIN:
            near += 1
            predicts[indices] = case["predicts"][indices]
            continue
        total += accepted
        predicts[indices[: accepted + 1]] = torch.tensor(tokens, dtype=torch.int32)
        assert int(case["accept_token_num"][request]) == accepted
        padding = [UNTOUCHED] * (slots - accepted - 1)
        assert case["accept_index"][request].tolist() == indices[: accepted + 1].tolist() + padding
    assert near <= 4
    assert torch.equal(case["predicts"], predicts)
    assert total > 0 or slots == 1


def test_the_block_function_and_both_spellings_are_the_same_call():
    wanted, block, respelt = (chain_case(20, 5, 9, seed=3) for _ in range(3))
    chain_speculative_sampling_triton(**wanted, block_verification=True)
    chain_block_speculative_sampling_triton(*block.values())
    chain_block_speculative_sampling_triton(**{name.replace("retrive", "retrieve"): respelt[name] for name in respelt})
    for name in NAMES:
        assert torch.equal(block[name], wanted[name])
        assert torch.equal(respelt[name], wanted[name])


def one_draft(own: float, uniform: float, final: float, target: list[float], others: list[float]) -> tuple[int, int]:
    """A draft of token 0 of this draft probability: how many are accepted, and the first token."""
    case = chain_case(1, 2, len(target), seed=4)
    case |= {
        "candidates": torch.tensor([[0, 0]]),
        "retrive_index": torch.tensor([[0, 1]]),
        "uniform_samples": torch.tensor([[uniform]]),
        "uniform_samples_for_final_sampling": torch.tensor([final]),
        "target_probs": torch.tensor([[target, target]]),
        "draft_probs": torch.tensor([[[own, *others]]]),
    }
    chain_speculative_sampling_triton(**case)
    return int(case["accept_token_num"]), int(case["predicts"][0])


@pytest.mark.parametrize("own", [1.0, 1 + 6e-6, 1.0009])
def test_a_draft_probability_just_above_1_counts_as_1(own):
    target = [0.5, 0.25, 0.25]
    assert one_draft(own, 0.49, 0.0, target, [0.0, 0.0]) == (1, 0)
    assert one_draft(own, 0.51, 0.49, target, [0.0, 0.0]) == (0, 1)
    assert one_draft(own, 0.51, 0.51, target, [0.0, 0.0]) == (0, 2)


@pytest.mark.parametrize("own", [0.0, -0.5, 2.0, 1.002, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("uniform", [0.0, 0.5])
def test_a_draft_without_a_usable_probability_is_never_accepted_nor_drawn(own, uniform):
    target = [0.5, 0.25, 0.25]
    assert one_draft(own, uniform, 0.0, target, [0.0, 0.0]) == (0, 1)
    assert one_draft(own, uniform, 0.49, target, [0.0, 0.0]) == (0, 1)
    assert one_draft(own, uniform, 0.51, target, [0.0, 0.0]) == (0, 2)
    assert one_draft(own, uniform, 0.0, target, [0.25, 0.1]) == (0, 2)  # what the others leave of the target
    assert one_draft(own, uniform, 0.0, target, [0.5, 0.5]) == (
        0,
        1,
    )  # they leave nothing: the target without the draft
    assert one_draft(own, uniform, 0.9, [1.0, 0.0, 0.0], [0.5, 0.5]) == (0, 0)  # and where that is nothing, the target


def test_other_entries_that_are_no_probabilities_count_as_0():
    target = [0.2, 0.4, 0.4]
    for bad in (math.nan, math.inf, -1.0, 2.0):
        assert one_draft(0.5, 0.99, 0.49, target, [bad, 0.0]) == (0, 1)
        assert one_draft(0.5, 0.39, 0.49, target, [bad, 0.5]) == (1, 0)


@pytest.mark.parametrize("block", [False, True])
def test_the_text_follows_the_target(block):
    batch, vocab = 20_000, 6
    case = chain_case(1, 4, vocab, seed=8)
    generator = torch.Generator().manual_seed(9)
    drafts = torch.multinomial(case["draft_probs"][0, :3], batch, replacement=True, generator=generator).t()
    case |= {
        "predicts": torch.zeros(batch * 4, dtype=torch.int32),
        "accept_index": torch.zeros(batch, 4, dtype=torch.int32),
        "accept_token_num": torch.zeros(batch, dtype=torch.int32),
        "candidates": torch.cat([drafts[:, :1], drafts], dim=1),
        "retrive_index": torch.arange(batch * 4).view(batch, 4),
        "uniform_samples": torch.rand(batch, 3, generator=generator),
        "uniform_samples_for_final_sampling": torch.rand(batch, generator=generator),
        "target_probs": case["target_probs"].expand(batch, 4, vocab),
        "draft_probs": case["draft_probs"].expand(batch, 4, vocab),
    }
    chain_speculative_sampling_triton(**case, block_verification=block)
    law, possible = case["target_probs"][0, 0].double(), case["target_probs"][0, 0] > 0
    counts = torch.bincount(case["predicts"].view(batch, 4)[:, 0].long(), minlength=vocab)
    assert counts[~possible].sum() == 0
    assert chisquare(counts[possible], law[possible] / law.sum() * batch).pvalue > 1e-3


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("candidates", torch.zeros(2, 0, dtype=torch.int64)),
        ("target_probs", torch.zeros(2, 3, 9)),
        ("draft_probs", torch.zeros(2, 2, 9)),
        ("draft_probs", torch.zeros(2, 3, 8)),
        ("uniform_samples", torch.zeros(2, 2)),
        ("uniform_samples_for_final_sampling", torch.zeros(3)),
        ("predicts", torch.zeros(8)),
        ("accept_index", torch.zeros(2, 3, dtype=torch.int32)),
        ("accept_token_num", None),
        ("retrive_index", torch.zeros(2, 3, dtype=torch.int64)),
        ("threshold_single", 0.5),
        ("threshold_acc", None),
        ("deterministic", 1),
        ("block_verification", "yes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_argument_is_named(argument, value):
    case = chain_case(2, 4, 9, seed=2) | {argument: value}
    if argument == "candidates":
        case["target_probs"] = torch.zeros(2, 0, 9)
        case |= {name: torch.zeros(2, 0, dtype=torch.int32) for name in ("accept_index", "retrive_index")}
    with pytest.raises(ValueError, match=rf"^{argument}: expected .*got"):
        chain_speculative_sampling_triton(**case)
