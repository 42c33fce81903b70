"""The text law by exact enumeration: speculation emits what the target distribution alone would."""

from __future__ import annotations

import pytest
import torch
from laws.enumeration import enumerate_rounds, expected_accepted, target_law, text_law
from laws.tiny_targets import DRAFTERS, TARGETS, Model, build

EXACT = 1e-12


def assert_the_law_is_the_targets(model: Model, bonus: bool, draft_len_used: int) -> None:
    rounds = enumerate_rounds(model, bonus, draft_len_used)
    length = model.draft.shape[0] + bonus
    law, expected = text_law(model, rounds, length), target_law(model.target, length)
    torch.testing.assert_close(law, expected, rtol=0, atol=EXACT)
    first = law.sum(tuple(range(1, law.dim())))
    torch.testing.assert_close(first, model.target[0, 0], rtol=0, atol=EXACT)
    accepted = float((rounds.weights * rounds.verdict.num_accepted).sum())
    assert accepted == pytest.approx(expected_accepted(model, draft_len_used), abs=EXACT)


@pytest.mark.parametrize("bonus", [True, False], ids=["bonus", "no bonus"])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("target", TARGETS)
def test_emitted_tokens_follow_the_product_of_the_target_distributions(target, drafter, bonus):
    for seed, draft_len_used in ((1, 2), (2, 2), (3, 1), (4, 0)):
        model = build(target, drafter, rows=3, draft_len=2, seed=seed)
        assert_the_law_is_the_targets(model, bonus, draft_len_used)


@pytest.mark.parametrize("target", TARGETS)
def test_the_law_holds_for_drafts_drawn_at_another_temperature(target):
    for seed in (1, 2):
        model = build(target, "member at another temperature", rows=2, draft_len=1, seed=seed)
        assert_the_law_is_the_targets(model, bonus=True, draft_len_used=1)


def test_the_law_holds_for_a_drafter_with_a_wider_vocabulary():
    for seed in (1, 2, 3):
        model = build("single", "outside of four tokens", rows=2, draft_len=1, seed=seed)
        assert model.draft[0, 0, 3] > 0, "the drafter never draws the token that the target lacks"
        assert_the_law_is_the_targets(model, bonus=True, draft_len_used=1)


def test_the_law_would_show_a_draft_that_is_not_what_it_is_said_to_be():
    """The same enumeration is not fooled: drafts from another distribution than the one given break the law."""
    model = build("single", "outside", rows=3, draft_len=2, seed=1)
    assert model.draft_logits is not None
    model.draft_logits.copy_(model.draft_logits.flip(-1))
    with pytest.raises(AssertionError):
        assert_the_law_is_the_targets(model, bonus=True, draft_len_used=2)
