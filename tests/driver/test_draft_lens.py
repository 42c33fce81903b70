"""Draft lengths that adapt: to the drafter's confidence, or to the acceptance so far."""

import itertools
import time
from types import SimpleNamespace

import pytest
import torch
from driver.test_schedules import GREEDY
from driver.text_law import fit_of_texts
from driver.tiny_models import PROMPT, Bigram, HeadedBigram, relative_of, tiny_llama
from specens import Job, SpeculativeEnsemble
from specens.analysis.compare import compare, with_other_schedules
from specens.decoding.draft_lens import ByAcceptance, ByConfidence
from specens.decoding.ideal import fixed_speedup, outside_speedup
from specens.decoding.request import OUTSIDE
from specens.drafters import DraftModel, Heads, PromptLookup

from specens_kernels import Mixture, Replacement, Sampling, target_logprobs

LENGTHS = {
    "confidence": ByConfidence(0.5, most=6),
    "fallback": ByConfidence(0.5, most=6, hands_over=True),
    "acceptance": ByAcceptance(6, cost=0.1),
}
JOBS = [Job([start, 2, 9], max_new_tokens=10 + 7 * (start % 3)) for start in range(5)]


@pytest.fixture(scope="module")
def pair():
    first = tiny_llama(0)
    return [first, relative_of(first, 1, noise=0.2)]


def setting(pair, name, drafts):
    if drafts == "a model":
        return SpeculativeEnsemble(pair[:1], None, None, LENGTHS[name], "fixed", drafter=DraftModel(pair[1]))
    if drafts == "members in turn":
        return SpeculativeEnsemble(pair, None, None, (LENGTHS[name], 1), "alternate")
    return SpeculativeEnsemble(pair, None, None, LENGTHS[name], "fixed", drafter=1)


SETTINGS = [
    *itertools.product(LENGTHS, ("a model", "a member")),
    ("confidence", "members in turn"),
    ("fallback", "members in turn"),
]


@pytest.mark.parametrize(("name", "drafts"), SETTINGS)
def test_texts_are_those_of_standard_and_of_any_batch(pair, name, drafts):
    ensemble = setting(pair, name, drafts)
    standard = SpeculativeEnsemble(pair[: len(ensemble.models)], schedule="standard")
    expected = standard.generate(PROMPT, max_new_tokens=40, sampling=GREEDY)
    result = ensemble.generate(PROMPT, max_new_tokens=40, sampling=GREEDY)
    assert result.tokens == expected.tokens
    assert sum(result.statistics.accepted) > 0
    for text in ensemble.generate_many(JOBS, batch_size=3, seed=1, sampling=Sampling(temperature=0.8)):
        job = JOBS[text.index]
        own = ensemble.generate(
            job.prompt, max_new_tokens=job.max_new_tokens, seed=text.seed, sampling=Sampling(temperature=0.8)
        )
        assert own.tokens == text.tokens
        assert own.statistics.drafted == text.statistics.drafted


@pytest.mark.parametrize(("name", "drafts"), SETTINGS)
def test_texts_follow_the_law(name, drafts):
    tables = 1.5 * torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(4))
    ensemble = setting([Bigram(table) for table in tables], name, drafts)
    members = list(tables[: len(ensemble.models)])
    transition = target_logprobs(members, ensemble=ensemble.ensemble).double().exp()
    assert fit_of_texts(ensemble, transition)[0] > 1e-4


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("drafter", ["a model", "heads", "prompt lookup"])
def test_rules_of_chains_keep_the_law_of_texts_whose_lengths_adapt(rule, drafter):
    tables = 1.5 * torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(4))
    drafters = {
        "a model": (ByConfidence(0.5, most=6), DraftModel(Bigram(tables[1]))),
        "heads": (
            ByConfidence(0.5, 2, hands_over=True),
            Heads(lambda hidden: torch.stack([hidden.roll(1, 1), 0.5 * hidden], 1)),
        ),
        "prompt lookup": (ByAcceptance(3, cost=0.2), PromptLookup()),
    }
    length, own = drafters[drafter]
    ensemble = SpeculativeEnsemble([HeadedBigram(tables[0])], None, None, length, "fixed", drafter=own, rule=rule)
    assert fit_of_texts(ensemble, tables[0].double().softmax(-1))[0] > 1e-4


def test_a_chain_ends_behind_a_draft_that_was_not_sure():
    """Tokens 0 to 2 follow each other for certain, and after 2 comes any token."""
    table = torch.full((4, 4), -30.0)
    table[0, 1] = table[1, 2] = table[3, 0] = 30.0
    table[2] = 0.0
    ensemble = SpeculativeEnsemble(
        [Bigram(table)], None, None, ByConfidence(0.5, most=9), "fixed", drafter=DraftModel(Bigram(table.clone()))
    )
    rounds = []
    result = ensemble.generate([3], max_new_tokens=60, seed=4, on_tokens=lambda events: rounds.append(len(events)))
    drafted = [3, *result.tokens]
    index = 0
    for number in rounds[:-1]:  # drafts up to the first one after token 2, and a bonus token
        chain = drafted[index + 1 : index + number]
        assert [token for token in drafted[index : index + len(chain)] if token == 2] == [2]
        assert drafted[index + len(chain) - 1] == 2
        index += number
    assert result.statistics.acceptance_rate == 1.0


def test_heads_stop_where_they_are_not_sure(pair):
    weights = pair[0].lm_head.weight

    def heads(hidden):  # of probability 1 and of 1/61
        return torch.stack([1e4 * (hidden @ weights.T), 0 * (hidden @ weights.T), hidden @ weights.T], 1)

    drafts = {}
    for length in (3, ByConfidence(0.5, most=3)):
        ensemble = SpeculativeEnsemble(pair[:1], None, None, length, "fixed", drafter=Heads(heads))
        statistics = ensemble.generate(PROMPT, max_new_tokens=30, seed=0).statistics
        drafts[length] = statistics.drafted[OUTSIDE] / statistics.rounds
    assert drafts[3] > 2.5
    assert 1.8 < drafts[ByConfidence(0.5, most=3)] <= 2


def fake_request(tested=0, accepted=0, counted=(0,)):
    statistics = SimpleNamespace(tested=[0, tested], accepted=[0, accepted])
    return SimpleNamespace(statistics=statistics, measured={}, counted=counted)


@pytest.mark.parametrize("cost", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("acceptance", [0.02, 0.5, 0.9])
def test_the_length_gives_the_most_tokens_a_second(acceptance, cost):
    """By simulated rounds: each draft is accepted with this probability, a forward of all members costs 1."""
    chosen = ByAcceptance(8, cost).choose(fake_request(10**6, int(acceptance * 10**6)), OUTSIDE)
    random_numbers = torch.rand(20_000, 8, generator=torch.Generator().manual_seed(0)) < acceptance
    rates = []
    for length in range(9):
        emitted = 1 + random_numbers[:, :length].long().cumprod(1).sum(1)
        rates.append(float(emitted.double().mean()) / (1 + cost * length))
    assert rates[chosen] > max(rates) - 0.02
    assert outside_speedup(chosen, acceptance, cost) == pytest.approx(rates[chosen], rel=0.02)


def test_a_member_with_a_weight_is_reckoned_with_its_bonus_forward():
    length = ByAcceptance(8, cost=0.3)
    request = fake_request(10**6, 700_000, counted=(0, 1))
    best = max(range(9), key=lambda drafts: fixed_speedup(drafts, 0.7, 0.3))
    assert length.choose(request, 1) == best
    assert length.acceptance(request, 1) == pytest.approx(0.7, abs=1e-4)


def test_good_drafts_grow_long_and_useless_ones_are_only_tried(pair):
    twin, stranger = relative_of(pair[0], 0, noise=0.0), tiny_llama(99, sharpness=30.0)
    length = ByAcceptance(7, cost=0.2)
    drafts = []
    for drafter in (twin, stranger):
        ensemble = SpeculativeEnsemble(pair[:1], None, None, length, "fixed", drafter=DraftModel(drafter))
        statistics = ensemble.generate(PROMPT, max_new_tokens=120, seed=0).statistics
        drafts.append(statistics.drafted[OUTSIDE] / statistics.rounds)
    assert drafts[0] > 5
    assert 0 < drafts[1] < 0.5


def test_lengths_do_not_hang_on_the_clock(pair, monkeypatch):
    ensemble = setting(pair, "acceptance", "a model")
    expected = ensemble.generate(PROMPT, max_new_tokens=40, seed=6)
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks) ** 2))
    other = ensemble.generate(PROMPT, max_new_tokens=40, seed=6)
    assert other.tokens == expected.tokens
    assert other.statistics.drafted == expected.statistics.drafted
    assert other.statistics.drafter_seconds > 1 > expected.statistics.seconds / 60


def test_adaptive_lengths_and_drafters_are_compared(pair):
    lone = SpeculativeEnsemble(pair[:1], None, None, LENGTHS["acceptance"], drafter=DraftModel(pair[1]))
    ensembles = with_other_schedules(lone)
    assert [ensemble.schedule_name for ensemble in ensembles] == ["standard", "fixed"]
    rows = compare(ensembles, PROMPT, max_new_tokens=10, repeats=1).rows
    assert rows[1].draft_lens == ["acceptance<=6"]
    assert rows[1].ideal_speedup is None
    assert rows[1].acceptance_rate is not None
    both = SpeculativeEnsemble(pair, None, None, LENGTHS["confidence"])
    assert [ensemble.schedule_name for ensemble in with_other_schedules(both)] == ["standard", "fixed", "alternate"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda _: ByConfidence(1.5), r"draft_lens: expected a threshold in \(0, 1\), got 1.5"),
        (lambda _: ByConfidence(0.5, 4, hands_over=1), "draft_lens: expected hands_over to be True or False, got 1"),
        (lambda _: ByConfidence(0.5, 0), "draft_lens: expected most to be an integer >= 1, got 0"),
        (lambda _: ByAcceptance(True, 0.1), "draft_lens: expected most to be an integer >= 1, got True"),
        (lambda _: ByAcceptance(4, -1.0), "draft_lens: expected a cost >= 0, got -1.0"),
        (lambda _: ByAcceptance(4, 0.1, expected=1.0), r"draft_lens: expected expected in \(0, 1\), got 1.0"),
        (lambda _: ByAcceptance(4, 0.1, decay=0.0), r"draft_lens: expected decay in \(0, 1\), got 0.0"),
        (
            lambda pair: SpeculativeEnsemble(pair, None, None, ByAcceptance(4, 0.1), "alternate"),
            "draft_lens: expected no ByAcceptance under schedule 'alternate'",
        ),
        (
            lambda pair: SpeculativeEnsemble(
                pair, None, Mixture((0.0, 1.0)), ByConfidence(0.5), "fixed", rule=Replacement()
            ),
            "rule: expected a drafter whose tokens have a probability, and a number as draft_lens, under Replacement",
        ),
        (
            lambda pair: SpeculativeEnsemble(pair, None, None, ByConfidence(0.5), "tree"),
            "draft_lens: expected numbers beside trees",
        ),
        (
            lambda pair: SpeculativeEnsemble(pair, None, None, ByConfidence(0.5), "fixed", drafter=PromptLookup()),
            "draft_lens: expected no ByConfidence, since drafts of PromptLookup have no probability",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "make",
)
def test_wrong_lengths_are_named(pair, make, message):
    with pytest.raises(ValueError, match=message):
        make(pair)
