"""Every schedule against `standard`, which defines the right answer."""

import itertools
import threading

import pytest
import torch
from cases import FULL
from driver.text_law import fit_of_texts
from driver.tiny_models import PROMPT, Bigram, relative_of, tiny_llama
from specens import SpeculativeEnsemble
from specens.decoding.draft_lens import ByAcceptance
from specens.decoding.scorer import Scorer
from specens.drafters import PromptLookup

from specens_kernels import Contrastive, LogitMixture, Mixture, Sampling, target_logprobs

GREEDY = Sampling(temperature=0.0)
ENSEMBLES = {
    "mixture": Mixture((0.3, 0.7)),
    "logit_mixture": LogitMixture((1.4, -0.3)),
    "contrastive": Contrastive(0.4, plausibility=0.05),
    "single_target": Mixture((1.0, 0.0)),
}


@pytest.fixture(scope="module")
def pair():
    first = tiny_llama(0)
    return [first, relative_of(first, 1, noise=0.2)]


def generate(members, schedule, draft_lens=1, ensemble=None, drafter=None, **arguments):
    return SpeculativeEnsemble(
        members, ensemble=ensemble, draft_lens=draft_lens, schedule=schedule, drafter=drafter
    ).generate(PROMPT, **({"max_new_tokens": 60, "seed": 3} | arguments))


@pytest.fixture(scope="module")
def greedy_texts(pair):
    """What `standard` writes, by ensemble."""
    texts = {name: generate(pair, "standard", ensemble=each, sampling=GREEDY) for name, each in ENSEMBLES.items()}
    return {name: text.tokens for name, text in texts.items()}


@pytest.mark.parametrize("name", ENSEMBLES)
@pytest.mark.parametrize("schedule", ["fixed", "alternate", "parallel"])
@pytest.mark.parametrize("draft_lens", [1, *[(1, 4)] * FULL, (5, 2)], ids=str)
def test_greedy_speculation_writes_the_tokens_of_standard(pair, greedy_texts, name, schedule, draft_lens):
    drafters = (0,) if schedule == "alternate" else (0, 1) if FULL else (0 if draft_lens == 1 else 1,)
    for drafter in drafters:
        result = generate(pair, schedule, draft_lens, ENSEMBLES[name], drafter, sampling=GREEDY)
        assert result.tokens == greedy_texts[name]
        drafts_for_itself = name == "single_target" and schedule != "alternate" and drafter == 0
        assert (result.statistics.recovered == 0) == drafts_for_itself  # all other drafts are put to the test


@pytest.mark.parametrize("draft_lens", [1, (3, 1), (1, 3)], ids=str)
@pytest.mark.parametrize("drafter", [0, 1])
def test_the_drafter_of_alternate_proposes_after_a_rejection(pair, greedy_texts, drafter, draft_lens):
    """The default proposer of Fu et al., ICML 2025: figure 4 has a curve for each of the members."""
    rounds = []
    result = generate(pair, "alternate", draft_lens, ENSEMBLES["mixture"], drafter, on_round=rounds.append, seed=4)
    follow = [own for before, own in itertools.pairwise(rounds) if before.events[-1].kind == "recovered"]
    assert len(follow) > 3
    assert {own.drafts[0]["proposer"] for own in follow} == {drafter}
    assert rounds[0].drafts[0]["proposer"] == drafter
    assert min(result.statistics.drafted[:2]) > 0  # the other one goes on after accepted drafts
    greedy = generate(pair, "alternate", draft_lens, ENSEMBLES["mixture"], drafter, sampling=GREEDY)
    assert greedy.tokens == greedy_texts["mixture"]


def test_the_drafter_of_alternate_is_obeyed_among_three_members_and_shared_weights(pair):
    members = [pair[0], pair[0], pair[1]]  # the first two read in one forward
    for drafter in range(3):
        rounds = []
        generate(members, "alternate", 2, Mixture((0.5, 0.2, 0.3)), drafter, on_round=rounds.append, seed=5)
        follow = [own for before, own in itertools.pairwise(rounds) if before.events[-1].kind == "recovered"]
        assert {own.drafts[0]["proposer"] for own in follow} == {drafter}


def test_greedy_speculation_of_three_members_writes_the_tokens_of_standard(pair):
    members = [*pair, relative_of(pair[0], 2)]
    ensemble = Mixture((0.5, 0.3, 0.2))
    expected = generate(members, "standard", ensemble=ensemble, sampling=GREEDY)
    for drafter, draft_lens, schedule in itertools.product((0, 1, 2), (1, 3), ("fixed", "parallel")):
        if not FULL and (drafter + draft_lens // 2 + (schedule == "parallel")) % 2:
            continue  # each pair of these choices is in the other half too
        result = generate(members, schedule, draft_lens, ensemble, drafter, sampling=GREEDY)
        assert result.tokens == expected.tokens


@pytest.mark.parametrize("schedule", ["standard", "fixed", "alternate", "parallel"])
def test_a_seed_reproduces_the_text_and_another_seed_changes_it(pair, schedule):
    first, again, other = (generate(pair, schedule, 2, seed=seed) for seed in (11, 11, 12))
    assert first.tokens == again.tokens
    assert first.tokens != other.tokens


def test_a_seed_that_was_drawn_reproduces_the_text(pair):
    first = generate(pair, "alternate", seed=None)
    assert generate(pair, "alternate", seed=first.seed).tokens == first.tokens
    assert generate(pair, "alternate", seed=None).seed != first.seed


# Longer drafts and `alternate` are in test_batches, and that texts of a batch are those of requests alone.
@pytest.mark.parametrize("name", ENSEMBLES)
@pytest.mark.parametrize("schedule", ["standard", *["fixed"] * FULL])
def test_sampled_texts_follow_the_law_of_the_ensemble(name, schedule):
    tables = 1.5 * torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(4))
    ensemble = SpeculativeEnsemble([Bigram(table) for table in tables], ensemble=ENSEMBLES[name], schedule=schedule)
    transition = target_logprobs(list(tables), ensemble=ENSEMBLES[name]).double().exp()
    assert fit_of_texts(ensemble, transition)[0] > 1e-4


OUTSIDERS = {
    "middle": Mixture((0.0, 1.0, 0.0)),
    "first": LogitMixture((1.0, 0.0, 0.0)),
    "two": Mixture((0.4, 0.0, 0.6)),
}


@pytest.mark.parametrize("name", OUTSIDERS)
def test_members_of_weight_zero_take_turns_with_others(pair, name):
    """One drafts after another's draft, without having scored the place of that."""
    members, target = [*pair, relative_of(pair[0], 2, noise=0.2)], OUTSIDERS[name]
    expected = generate(members, "standard", ensemble=target, sampling=GREEDY).tokens
    for draft_lens, drafter in [(1, None), ((2, 1, 3), 0), ((2, 1, 3), 2)]:
        result = generate(members, "alternate", draft_lens, target, drafter, sampling=GREEDY, logprobs=True)
        assert result.tokens == expected


@pytest.mark.parametrize("name", ["middle", "two"])
def test_texts_of_members_of_weight_zero_and_others_follow_the_law(name):
    tables = [1.5 * torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    transition = target_logprobs(tables, ensemble=OUTSIDERS[name]).double().exp()
    ensemble = SpeculativeEnsemble([Bigram(table) for table in tables], ensemble=OUTSIDERS[name], schedule="alternate")
    assert fit_of_texts(ensemble, transition)[0] > 1e-3


def test_under_parallel_the_others_read_in_a_thread_while_the_drafter_drafts(pair, monkeypatch):
    read, threads = Scorer.read, {0: set(), 1: set()}

    def noted(self, asked):
        threads[self.index].add(threading.current_thread() is threading.main_thread())
        return read(self, asked)

    monkeypatch.setattr(Scorer, "read", noted)
    statistics = generate(pair, "parallel", 3, Mixture((1.0, 0.0)), 1).statistics
    assert threads == {0: {False}, 1: {True}}
    assert statistics.bonus == 0
    assert sum(statistics.tested) == statistics.accepted[1] + statistics.recovered
    assert statistics.forwards[0] <= statistics.rounds + 1


def test_parallel_refuses_drafters_that_cannot_be_read_beside_the_members(pair):
    for members, arguments, message in [
        ([pair[0], pair[0]], {}, "drafter: expected one with weights of its own"),
        (pair, {"drafter": PromptLookup()}, "drafter: expected a member or a DraftModel"),
        (pair, {"draft_lens": ByAcceptance(4, 0.1)}, "draft_lens: expected no ByAcceptance"),
        (pair[:1], {}, "schedule: expected two members"),
        (pair, {"rule": "block"}, "rule: expected 'token' or 'gumbel'"),
    ]:
        with pytest.raises(ValueError, match=message):
            SpeculativeEnsemble(members, **({"schedule": "parallel", "drafter": 0} | arguments))


def test_alternate_needs_half_the_forwards_where_members_agree(pair):
    twins = [pair[0], relative_of(pair[0], 1, noise=0.0)]
    statistics = generate(twins, "alternate").statistics
    assert statistics.acceptance_rate == 1.0
    assert statistics.recovered == 0
    assert sum(statistics.forwards) == 60 + 1
    assert sum(generate(twins, "standard").statistics.forwards) == 2 * 60


@pytest.mark.parametrize("noise", [0.05, 0.4, 3.0])
def test_alternate_never_needs_more_forwards_than_standard(pair, noise):
    members = [pair[0], relative_of(pair[0], 5, noise)]
    for text in SpeculativeEnsemble(members).generate_many([PROMPT] * 5, seed=0, max_new_tokens=60, batch_size=5):
        statistics = text.statistics
        rejected = statistics.recovered
        # One forward for each test, and one more for each chain that opens on a token no member knew.
        assert 60 <= sum(statistics.forwards) - 1 <= 60 + rejected
        assert sum(statistics.forwards) <= 2 * 60


def test_fixed_adds_a_bonus_token_for_one_forward_of_the_drafter(pair):
    twins = [pair[0], relative_of(pair[0], 1, noise=0.0)]
    statistics = generate(twins, "fixed", draft_lens=3).statistics
    rounds = 60 // 4
    assert statistics.rounds == rounds
    assert statistics.bonus == rounds
    assert statistics.forwards == [rounds * 4, rounds]


@pytest.mark.parametrize("schedule", ["fixed", "alternate"])
@pytest.mark.parametrize("draft_lens", [1, 4])
def test_statistics_account_for_every_token(pair, schedule, draft_lens):
    result = generate(pair, schedule, draft_lens)
    statistics = result.statistics
    kinds = [event.kind for event in result.events]
    assert statistics.emitted == len(result.tokens) == 60
    assert sum(statistics.accepted) == kinds.count("draft accepted")
    assert statistics.recovered == kinds.count("recovered")
    assert statistics.bonus == kinds.count("bonus")
    assert sum(statistics.accepted) + statistics.recovered + statistics.bonus == 60
    assert sum(statistics.tested) == sum(statistics.accepted) + statistics.recovered
    assert sum(statistics.drafted) >= sum(statistics.tested)
    assert statistics.seconds >= statistics.propose_seconds + statistics.score_seconds + statistics.verify_seconds
    for index in (0, 1):
        owned = [event for event in result.events if event.proposer == index]
        assert statistics.accepted[index] == len(owned)


def test_logprobs_are_those_of_the_target_distribution(pair):
    ensemble = Mixture((0.5, 0.5))
    for schedule in ("standard", "fixed", "alternate"):
        result = generate(pair, schedule, 2, ensemble, logprobs=True)
        ids = torch.tensor([PROMPT + result.tokens])
        with torch.inference_mode():
            logits = [member(ids).logits[0, len(PROMPT) - 1 : -1] for member in pair]
        expected = target_logprobs(logits, ensemble=ensemble).gather(1, torch.tensor(result.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(result.logprobs), expected, rtol=1e-4, atol=1e-4)


def test_standard_does_not_forward_a_member_of_weight_zero(pair):
    result = generate(pair, "standard", ensemble=Mixture((1.0, 0.0)), sampling=GREEDY)
    assert result.statistics.forwards == [60, 0]
    alone = SpeculativeEnsemble(pair[:1], schedule="standard").generate(PROMPT, max_new_tokens=60, sampling=GREEDY)
    assert result.tokens == alone.tokens
