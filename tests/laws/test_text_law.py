"""The text law over several rounds with seeds: chi-square of many texts against the target distribution."""

from __future__ import annotations

import pytest
import torch
from cases import FULL
from laws.enumeration import expected_accepted, target_law
from laws.tiny_targets import VOCAB, Model, build
from scipy import stats
from torch import Tensor

from specens_kernels import Sampling, Verdict, sample, verify_chain

TEXTS = 100_000 if FULL else 40_000
LENGTH = 4
DRAFT_LEN = 2
LEAST_PROBABILITY = 1e-4  # of a chi-square; the seeds are fixed, so that a test passes always or never
ENSEMBLES = [
    "single",
    "mixture",
    "mixture of three vocabularies",
    "logit mixture",
    "contrastive, amateur drafts",
    "plausible, amateur drafts",
]
PROMPT = 1000  # tokens before the text: positions are absolute


def propose(model: Model, before: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draft tokens [batch, DRAFT_LEN], each drawn from the draft distribution after the one before it."""
    sampling: Sampling = model.arguments.get("draft_sampling", model.arguments["sampling"])
    drafter = model.arguments.get("drafter")
    tokens = []
    for step in range(DRAFT_LEN):
        member = int(drafter[step % len(drafter)]) if isinstance(drafter, Tensor) else drafter
        row = min(step, len(model.draft) - 1)
        if model.draft_logits is not None:
            logits = model.draft_logits[row, before]
        elif member in (None, -1):
            before = model.draft[row, before].argmax(-1)
            tokens.append(before)
            continue
        else:
            logits = model.member_logits[member][row, before]
        arguments = {"seeds": seeds, "positions": positions, "step": step, "backend": "reference"}
        before = sample(logits, sampling=sampling, **arguments).tokens
        tokens.append(before)
    return torch.stack(tokens, 1)


def verify(model: Model, before: Tensor, drafts: Tensor, bonus: bool, seeds: Tensor, positions: Tensor) -> Verdict:
    after = torch.cat([before[:, None], drafts], 1)  # the token before each row
    arguments = dict(model.arguments)
    if isinstance(arguments.get("drafter"), Tensor):
        arguments["drafter"] = arguments["drafter"][: len(model.draft)].repeat(DRAFT_LEN)[:DRAFT_LEN].expand_as(drafts)
    if model.draft_logits is not None:
        arguments["draft_logits"] = model.draft_logits[0, after[:, :DRAFT_LEN]]
    logits = [member[0, after[:, : DRAFT_LEN + bonus]] for member in model.member_logits]
    return verify_chain(logits, drafts, seeds=seeds, positions=positions, backend="reference", **arguments)


def first_round(model: Model, bonus: bool) -> Verdict:
    seeds, positions = torch.arange(TEXTS), torch.full((TEXTS,), PROMPT)
    before = torch.zeros(TEXTS, dtype=torch.int64)
    return verify(model, before, propose(model, before, seeds, positions), bonus, seeds, positions)


def generate(model: Model, bonus: bool) -> tuple[Tensor, int]:
    """LENGTH tokens of each text after token 0, and the rounds that it took until all had them."""
    seeds, lengths = torch.arange(TEXTS), torch.zeros(TEXTS, dtype=torch.int64)
    texts = torch.zeros(TEXTS, LENGTH + DRAFT_LEN + 1, dtype=torch.int64)
    before, rounds = texts[:, 0].clone(), 0
    while (open_texts := (lengths < LENGTH).nonzero()[:, 0]).numel() > 0:
        own, positions = seeds[open_texts], PROMPT + lengths[open_texts]
        drafts = propose(model, before[open_texts], own, positions)
        verdict = verify(model, before[open_texts], drafts, bonus, own, positions)
        for column in range(DRAFT_LEN + 1):
            emitted = verdict.tokens[:, column] >= 0
            indices = open_texts[emitted]
            before[indices] = verdict.tokens[emitted, column]
            texts[indices, lengths[indices]] = before[indices]
            lengths[indices] += 1
        rounds += 1
    return texts[:, :LENGTH], rounds


def assert_law(tokens: Tensor, law: Tensor) -> None:
    """Chi-square of texts [batch, length] against their law [vocab] * length; impossible texts must not occur."""
    cells = (tokens * VOCAB ** torch.arange(tokens.shape[1] - 1, -1, -1)).sum(1)
    counts, expected = torch.bincount(cells, minlength=law.numel()), law.flatten() * len(tokens)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    if possible.sum() > 1:
        assert stats.chisquare(counts[possible].numpy(), expected[possible].numpy()).pvalue > LEAST_PROBABILITY


@pytest.mark.parametrize("drafter", ["one-hot", "member", "member a token", "outside"])
@pytest.mark.parametrize("target", ENSEMBLES)
def test_texts_of_several_rounds_follow_the_target_law(target, drafter):
    model = build(target, drafter, rows=1, draft_len=DRAFT_LEN, seed=11)
    texts, rounds = generate(model, bonus=True)
    assert rounds >= 2
    assert_law(texts, target_law(model.target, LENGTH))


@pytest.mark.parametrize("target", ENSEMBLES)
def test_texts_of_rounds_without_a_bonus_row_follow_the_target_law(target):
    model = build(target, "outside", rows=1, draft_len=DRAFT_LEN, seed=11)
    texts, rounds = generate(model, bonus=False)
    assert rounds >= 2
    assert_law(texts, target_law(model.target, LENGTH))


@pytest.mark.parametrize("drafter", ["one-hot", "outside"])
@pytest.mark.parametrize("target", ENSEMBLES)
def test_one_round_emits_the_target_law_and_accepts_what_it_should(target, drafter):
    """A rule that accepts everything, or compares two independent draws, would accept another share."""
    model = build(target, drafter, rows=1, draft_len=1, seed=12)
    verdict = first_round(model, bonus=True)
    assert_law(verdict.tokens[:, :1], target_law(model.target, 1))
    share = float((verdict.num_accepted > 0).double().mean())
    expected = expected_accepted(model, 1)
    assert abs(share - expected) <= 4 * (expected * (1 - expected) / TEXTS) ** 0.5 + 1e-6


def test_a_seed_gives_the_same_text_again():
    model = build("mixture", "member", rows=1, draft_len=DRAFT_LEN, seed=11)
    texts, _ = generate(model, bonus=True)
    assert torch.equal(texts, generate(model, bonus=True)[0])


def test_drafts_that_share_random_numbers_with_their_test_would_miss_the_law():
    """What separate streams are for: drafts drawn with the uniforms of the acceptance test bias the text."""
    law, draft_law = torch.tensor([[0.25, 0.25, 0.5], [0.5, 0.25, 0.25]], dtype=torch.float64)
    target, draft = law.log().float().expand(TEXTS, -1), draft_law.log().float().expand(TEXTS, -1)
    arguments = {"seeds": torch.arange(TEXTS), "positions": torch.full((TEXTS,), PROMPT), "backend": "reference"}
    for stream, is_lawful in ((2, True), (0, False)):
        drafts = sample(draft, stream=stream, **arguments).tokens[:, None]
        assert_law(drafts, draft_law)
        verdict = verify_chain(target[:, None], drafts, draft_logits=draft[:, None], **arguments)
        counts = torch.bincount(verdict.tokens[:, 0], minlength=3)
        probability = stats.chisquare(counts.numpy(), (TEXTS * law).numpy()).pvalue
        assert (probability > LEAST_PROBABILITY) == is_lawful
