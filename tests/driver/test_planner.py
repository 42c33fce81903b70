"""Predictions of the planner, against closed forms and against generations whose forwards are counted."""

import io
import json
import random
import sys
from dataclasses import replace

import pytest
import torch
from cases import FULL
from driver.tiny_models import PROMPT, Bigram, relative_of, save_pair, tiny_llama
from rich.console import Console
from specens import SpeculativeEnsemble
from specens.analysis.measure import measure, measure_weights
from specens.analysis.planner import (
    WORTHWHILE,
    Candidate,
    Given,
    GroupCost,
    Link,
    Measured,
    candidates,
    pick,
    predict,
    predict_all,
    simulate,
)
from specens.analysis.speedup_plot import picture_title, plot_speedups, speedups_by_length, speedups_by_weight
from specens.cli.display import show_plan
from specens.cli.main import app
from specens.decoding.draft_lens import ByAcceptance
from specens.decoding.ideal import (
    alternate_speedup,
    alternate_speedup_of_the_paper,
    fixed_speedup,
    least_acceptance,
    parallel_speedup,
)
from specens.drafters import PromptLookup
from typer.testing import CliRunner

from specens_kernels import Contrastive, LogitMixture, Mixture, Sampling, target_logprobs

SETTINGS = {
    "standard": Candidate("standard", (1, 1)),
    "fixed 1": Candidate("fixed", (1, 1)),
    "fixed 4, drafter 1": Candidate("fixed", (4, 4), drafter=1),
    "alternate 1": Candidate("alternate", (1, 1)),
    "alternate 3,1": Candidate("alternate", (3, 1)),
    "alternate 2,4": Candidate("alternate", (2, 4)),
    "alternate 1, drafter 1": Candidate("alternate", (1, 1), drafter=1),
    "alternate 3,1, drafter 1": Candidate("alternate", (3, 1), drafter=1),
    "three, alternate 2,1,2, drafter 1": Candidate("alternate", (2, 1, 2), drafter=1),
    "parallel 3, drafter 1": Candidate("parallel", (3, 3), drafter=1),
    "three, parallel 2": Candidate("parallel", (2, 2, 2), drafter=2),
    "three, fixed 2": Candidate("fixed", (2, 2, 2), drafter=2),
    "three, alternate 1": Candidate("alternate", (1, 1, 1)),
    "three, alternate 3,1,2": Candidate("alternate", (3, 1, 2)),
}
SAMPLING = Sampling(temperature=0.8)
NUM_TOKENS, GREEDY_TOKENS = 80, 80 if FULL else 40


@pytest.fixture(scope="module")
def members():
    first = tiny_llama(0)
    return [first, relative_of(first, 1, noise=0.25), relative_of(first, 2, noise=0.25)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("models"))


@pytest.fixture
def roughly(monkeypatch):
    """Few simulations of each way, which take most of the time, where predictions need not be precise."""
    monkeypatch.setattr("specens.analysis.planner.REPEATS", 2)


def even(acceptance, costs, num_tokens=400, prompt=0.0, outside=0.0):
    """Measurements of members whose acceptance and costs are the same everywhere; costs: seconds of any forward."""
    return Measured(
        costs={(index,): GroupCost({1: cost}, prompt) for index, cost in enumerate(costs)},
        outside=outside,
        acceptance=[[[acceptance] * num_tokens for _ in costs]],
        counted=tuple(range(len(costs))),
        weights=(1 / len(costs),) * len(costs),
        groups=[[index] for index in range(len(costs))],
    )


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.8, 1.0])
def test_predictions_with_even_costs_are_the_closed_forms(acceptance):
    measured = even(acceptance, (1.0, 1.0), num_tokens=2000)
    speed = predict(measured, Candidate("standard", (1, 1))).tokens_per_second
    assert speed == pytest.approx(0.5, rel=1e-3)
    alternate = predict(measured, Candidate("alternate", (1, 1)), speed)
    assert alternate.speedup == pytest.approx(alternate_speedup(acceptance), rel=0.01)
    for costs in [(1.0, 1.0), (0.2, 1.0)]:
        measured = even(acceptance, costs, num_tokens=2000)
        speed = predict(measured, Candidate("standard", (1, 1))).tokens_per_second
        for draft_len in (1, 3, 6):
            fixed = predict(measured, Candidate("fixed", (draft_len, draft_len)), speed)
            assert fixed.speedup == pytest.approx(fixed_speedup(draft_len, acceptance, costs[0]), rel=0.015)
            assert fixed.acceptance == pytest.approx(acceptance, abs=0.01)


def test_n_members_that_always_agree_need_one_forward_for_a_token():
    for num_members in (2, 3, 5):
        prediction = predict(even(1.0, (1.0,) * num_members), Candidate("alternate", (1,) * num_members))
        assert sum(prediction.forwards) == pytest.approx(1.0, abs=0.02)
        rejecting = predict(even(0.0, (1.0,) * num_members), Candidate("alternate", (1,) * num_members))
        assert sum(rejecting.forwards) == pytest.approx(num_members, rel=0.01)


@pytest.mark.parametrize(
    ("draft_len", "begins", "paper", "turns"), [(1, None, 1.15, 1.67), (1, 0, 1.15, 1.75), (3, 0, 1.95, 1.66)]
)
def test_the_formula_of_theorem_3_6_is_not_what_the_turns_give(draft_len, begins, paper, turns):
    """Fu et al., ICML 2025: right at equal costs and one draft each, else too low or too high."""
    lens = (draft_len, draft_len)
    assert alternate_speedup_of_the_paper((1, 1), 0.8, 1.0) == pytest.approx(alternate_speedup(0.8))
    assert alternate_speedup_of_the_paper(lens, 0.8, 0.2) == pytest.approx(paper, abs=0.006)
    measured = even(0.8, (0.2, 1.0), num_tokens=2000)
    speed = predict(measured, Candidate("standard", (1, 1))).tokens_per_second
    assert predict(measured, Candidate("alternate", lens, begins), speed).speedup == pytest.approx(turns, abs=0.02)


@pytest.mark.parametrize("cost", [0.05, 0.2, 1.0, 3.0])
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.9])
def test_one_draft_each_is_never_slower_than_standard(cost, acceptance):
    """Corollary 3.7, which the turns keep whoever begins after a rejection."""
    assert alternate_speedup_of_the_paper((1, 1), acceptance, cost) >= 1
    measured = even(acceptance, (cost, 1.0), num_tokens=1000 if FULL else 400)
    speed = predict(measured, Candidate("standard", (1, 1))).tokens_per_second
    for begins in (None, 0, 1):
        assert predict(measured, Candidate("alternate", (1, 1), begins), speed).speedup >= 0.999


def test_weights_promise_an_acceptance_and_with_it_a_speed(members):
    """Theorem 3.2: at least its weight, and no more where no token is common to the members."""
    generator = torch.Generator().manual_seed(0)
    for weight in (0.2, 0.5, 0.8):
        sharp = [8 * torch.randn(500, 12, generator=generator) for _ in range(2)]
        target = target_logprobs(sharp, ensemble=Mixture((weight, 1 - weight))).exp()
        accepted = torch.minimum(target, sharp[0].softmax(-1)).sum(-1)
        assert float(accepted.min()) >= least_acceptance(weight) - 1e-5
        assert float(accepted.min()) < least_acceptance(weight) + 0.01
    measured = measure_all(members[:2], [SETTINGS["fixed 1"]], 2, SAMPLING, Mixture((0.7, 0.3)))
    assert measured.least == pytest.approx((0.7, 0.3))
    for own, least in zip(measured.acceptance[0], measured.least, strict=True):
        assert min(own) >= least - 1e-5
    costs = {indices: GroupCost({1: 1.0}, 0.0) for indices in measured.costs}  # not the clock's
    measured = replace(measured, costs=costs, outside=0.0)
    for prediction in predict_all(measured, [c for c in candidates(2, 3) if c.schedule != "standard"]):
        assert prediction.least_speedup <= prediction.speedup + 0.02
    for ensemble, sampling in [
        (Mixture((0.7, 0.3)), Sampling(0)),
        (Mixture((0.7, 0.3)), Sampling(top_k=5)),
        (Contrastive(0.1), SAMPLING),
    ]:
        assert measure_all(members[:2], [SETTINGS["fixed 1"]], 1, sampling, ensemble, 10).least is None


def ensemble_of(members, candidate, ensemble=None):
    """Members under a candidate's schedule."""
    arguments = {} if candidate.schedule == "standard" else {"drafter": candidate.drafter}
    return SpeculativeEnsemble(members, None, ensemble, candidate.draft_lens, candidate.schedule, **arguments)


def text_of(members, candidate, ensemble=None, **settings):
    """A text under a candidate's schedule."""
    own = ensemble_of(members, candidate, ensemble)
    return own.generate(PROMPT, **({"max_new_tokens": NUM_TOKENS, "stop_tokens": ()} | settings))


def statistics_of(ensemble, prompt, samples, **settings):
    """Those of several texts, in one batch: each counts what it would count alone."""
    texts = ensemble.generate_many([prompt], samples=samples, batch_size=samples, seed=50, stop_tokens=(), **settings)
    return [text.statistics for text in texts]


def measure_all(members, chosen, samples, sampling, ensemble=None, max_new_tokens=NUM_TOKENS):
    standard = SpeculativeEnsemble(members, ensemble=ensemble, schedule="standard")
    settings = {"max_new_tokens": max_new_tokens, "samples": samples, "sampling": sampling, "repeats": 1}
    return measure(standard, PROMPT, candidates=chosen, **settings)


ENSEMBLES = {
    "mixture": Mixture((0.3, 0.7)),
    "a drafter without a weight": Mixture((1.0, 0.0)),
    "a target without a weight": Mixture((0.0, 1.0)),
    "logits": LogitMixture((1.3, -0.3)),
    "contrast": Contrastive(0.2, 0.05),
    "three": None,
}


@pytest.mark.parametrize("name", ENSEMBLES)
def test_the_forwards_of_a_greedy_text_are_predicted_one_by_one(members, name):
    ensemble, num_members = ENSEMBLES[name], 3 if name == "three" else 2
    chosen = [candidate for candidate in SETTINGS.values() if len(candidate.draft_lens) == num_members]
    if num_members == 2 and not FULL:  # each setting with some of the ensembles
        chosen = chosen[list(ENSEMBLES).index(name) % 2 :: 2]
    measured = measure_all(members[:num_members], chosen, 1, Sampling(0), ensemble, GREEDY_TOKENS)
    for candidate in chosen:
        settings = {"ensemble": ensemble, "sampling": Sampling(0), "max_new_tokens": GREEDY_TOKENS}
        statistics = text_of(members[:num_members], candidate, **settings).statistics
        prediction = predict(measured, candidate)
        found = [max(count - 1, 0) / GREEDY_TOKENS for count in statistics.forwards]
        assert prediction.forwards == pytest.approx(found, abs=1e-9), candidate
        indices = [[index] for index in range(num_members)]
        run = simulate(measured, candidate, indices, measured.acceptance[0], random.Random(0))
        for reads, fed in zip(run.reads, statistics.tokens_fed, strict=True):  # with the prompt drafts are read
            assert 0 <= fed - sum(reads) - len(PROMPT) * (fed > 0) <= sum(candidate.draft_lens), candidate
        assert (run.num_tested, run.num_accepted) == (sum(statistics.tested), sum(statistics.accepted)), candidate


@pytest.mark.parametrize("num_members", [1, 2])
def test_the_forwards_of_a_lookup_are_predicted_one_by_one(num_members):
    generator = torch.Generator().manual_seed(4)
    members = [Bigram(torch.randn(7, 7, generator=generator)) for _ in range(num_members)]
    lookup, prompt = PromptLookup(max_match=3), [1, 2, 3, 1, 2, 4, 1]
    chosen = [one for one in candidates(num_members, 4, "lookup:3") if one.drafter == "lookup:3"][1::2]
    standard = SpeculativeEnsemble(members, schedule="standard")
    settings = {"sampling": SAMPLING, "max_new_tokens": NUM_TOKENS}
    measured = measure(standard, prompt, candidates=chosen, lookup=lookup, samples=16, repeats=1, **settings)
    for candidate in chosen:
        own = SpeculativeEnsemble(
            members, draft_lens=candidate.draft_lens[0], schedule="fixed", drafter=PromptLookup(max_match=3)
        )
        texts = statistics_of(own, prompt, 50, **settings)
        prediction = predict(measured, candidate)
        found = [sum(one.forwards[index] - 1 for one in texts) / (50 * NUM_TOKENS) for index in range(num_members)]
        assert prediction.forwards == pytest.approx(found, rel=0.06), candidate
        rate = sum(sum(one.accepted) for one in texts) / sum(sum(one.tested) for one in texts)
        assert prediction.acceptance == pytest.approx(rate, abs=0.04)
        greedy = measure(
            standard,
            prompt,
            candidates=[candidate],
            lookup=lookup,
            samples=1,
            repeats=1,
            sampling=Sampling(0),
            max_new_tokens=NUM_TOKENS,
        )
        text = own.generate(prompt, sampling=Sampling(0), max_new_tokens=NUM_TOKENS, stop_tokens=()).statistics
        exact = [(count - 1) / NUM_TOKENS for count in text.forwards]
        assert predict(greedy, candidate).forwards == pytest.approx(exact, abs=1e-9), candidate


def test_the_forwards_of_sampled_texts_are_predicted_within_some_percent():
    generator = torch.Generator().manual_seed(4)
    logits = 2 * torch.randn(3, 23, 23, generator=generator)
    members = [Bigram(logits[0] + 0.5 * logits[index]) for index in range(3)]
    for num_members in (2, 3):
        chosen = [one for one in SETTINGS.values() if len(one.draft_lens) == num_members and one.schedule != "standard"]
        chosen = chosen[1::2]
        measured = measure_all(members[:num_members], chosen, 25, SAMPLING, max_new_tokens=100)
        for candidate in chosen:
            settings = {"sampling": SAMPLING, "max_new_tokens": 100}
            found = statistics_of(ensemble_of(members[:num_members], candidate), PROMPT, 25, **settings)
            prediction = predict(measured, candidate)
            forwards = [sum(one.forwards[index] - 1 for one in found) for index in range(num_members)]
            assert sum(prediction.forwards) == pytest.approx(sum(forwards) / 2500, rel=0.04)
            rate = sum(sum(one.accepted) for one in found) / sum(sum(one.tested) for one in found)
            assert prediction.acceptance == pytest.approx(rate, abs=0.03)


def test_members_that_share_weights_are_read_together_where_the_schedule_does(members):
    first, second = members[:2]
    chosen = [Candidate("standard", (1, 1, 1)), Candidate("fixed", (2, 2, 2), 1), Candidate("alternate", (2, 1, 1))]
    for own in ([first, first, second], [first, first, first]):
        measured = measure_all(own, chosen, 1, Sampling(0))
        for candidate in chosen:
            statistics = text_of(own, candidate, sampling=Sampling(0)).statistics
            found = [(count - 1) / NUM_TOKENS for count in statistics.forwards]
            assert predict(measured, candidate).forwards == pytest.approx(found, abs=1e-9), candidate


def test_a_cost_between_those_measured_grows_evenly():
    cost = GroupCost({1: 1.0, 2: 2.0, 4: 3.0}, prompt=9.0)
    assert [cost.of(count) for count in (1, 2, 3, 4, 6, 8)] == [1.0, 2.0, 2.5, 3.0, 4.0, 5.0]
    assert GroupCost({1: 1.5}, 0.0).of(7) == 1.5


@pytest.mark.usefixtures("roughly")
def test_the_best_schedule_depends_on_what_two_tokens_cost():
    cheap = even(0.85, (1.0, 1.0))
    costs = {indices: GroupCost({1: 1.0, 2: 2.1, 8: 2.2}, 0.0) for indices in cheap.costs}
    dear = Measured(costs, 0.0, cheap.acceptance, cheap.counted, cheap.weights, cheap.groups)
    chosen = list(candidates(2, 8))
    best = predict_all(cheap, chosen)[0]
    assert best.candidate.schedule == "alternate"
    assert best.speedup == pytest.approx(2 / (2 - 0.85), rel=0.1)
    assert predict_all(dear, chosen)[0].candidate != best.candidate
    even_lens = Candidate("alternate", (1, 1))
    assert predict(dear, even_lens).tokens_per_second < 0.65 * predict(cheap, even_lens).tokens_per_second


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.8, 1.0])
@pytest.mark.parametrize(("draft_len", "cost"), [(1, 1.0), (4, 0.25), (4, 0.5), (8, 0.1)])
def test_members_apart_draft_while_others_verify_at_the_speed_of_the_closed_form(acceptance, draft_len, cost):
    measured = replace(even(acceptance, (1.0, cost), num_tokens=2000), devices=(0, 1))
    speed = predict(measured, Candidate("standard", (1, 1))).tokens_per_second
    assert speed == pytest.approx(1.0, rel=1e-3)  # both forward at the same time
    found = predict(measured, Candidate("parallel", (draft_len, draft_len), 1), speed)
    assert found.speedup == pytest.approx(parallel_speedup(draft_len, acceptance, cost), rel=0.02)


def test_drafting_while_verifying_is_planned_for_where_members_are_apart():
    assert all(one.schedule != "parallel" for one in candidates(2, 8))
    chosen = [one for one in candidates(2, 8, apart=True) if len(set(one.draft_lens)) == 1]
    measured = replace(even(0.9, (1.0, 0.2)), devices=(0, 1))
    best = predict_all(measured, chosen)[0].candidate
    assert (best.schedule, best.drafter) == ("parallel", 1)
    assert 4 <= best.draft_lens[1] <= 6


@pytest.mark.parametrize(
    ("devices", "seconds"), [((0, 0), 1.5), ((0, 1), 1.0), ((1, 2), 1.35), ((1, 1), 2.2), ((1, 0), 1.35)]
)
def test_the_busiest_device_and_its_link_say_what_a_step_takes(devices, seconds):
    given = Given(devices=devices, link=Link(0.25, 100.0), row_bytes=10)
    measured = given.over(even(1.0, (1.0, 0.5), num_tokens=1000))
    assert predict(measured, Candidate("standard", (1, 1))).tokens_per_second == pytest.approx(1 / seconds, rel=2e-3)
    # of 4 drafts and a bonus token: the drafter's reads in a row, then one read of 5 tokens, then the last draft's
    drafter, other = (own + (device > 0) * 0.25 for own, device in zip((0.5, 1.0), reversed(devices)))
    rows = [0.1 * (device > 0) for device in reversed(devices)]
    fixed = predict(measured, Candidate("fixed", (4, 4), drafter=1)).tokens_per_second
    assert fixed == pytest.approx(5 / (5 * (drafter + rows[0]) + other + 5 * rows[1]), rel=2e-2)


def test_what_is_given_stands_in_place_of_what_was_measured(members):
    costs = [GroupCost({1: 2.0}, 2.0), GroupCost({1: 1.0}, 1.0)]
    found = Given(costs, (0.5, 1.0)).over(measure_all(members[:2], [SETTINGS["fixed 1"]], 1, SAMPLING))
    assert found.mean_acceptance() == [0.5, 1.0]
    assert found.costs == {(0,): costs[0], (1,): costs[1]}
    assert found.row_bytes == 61 * 4
    shared = replace(even(0.5, (1.0, 1.0)), groups=[[0, 1]])
    with pytest.raises(ValueError, match=r"costs: expected none where members \[0, 1\] share weights"):
        Given(costs).over(shared)
    with pytest.raises(ValueError, match=r"devices: expected one for members that share weights, \[0, 1\]"):
        Given(devices=(0, 1)).over(shared)


STATED = ("--forward-ms", "20:.5,5", "--acceptance", ".9,.8", "--weights", "1,0")


def test_the_command_plans_for_members_that_are_not_here():
    own = [*STATED, "--devices", "0,1", "--link", "100:50", "--row-bytes", "256000", "--longest", "4", "--json"]
    result = CliRunner().invoke(app, ["plan", *own])
    assert result.exit_code == 0, result.stderr
    values = json.loads(result.stdout)
    by_schedule = {one["options"]: one["tokens_per_second"] for one in values["predictions"]}
    assert by_schedule["--schedule standard"] == pytest.approx(50, rel=1e-3)
    assert values["best"] == "--schedule parallel --draft-lens 4,4 --drafter 1"
    assert values["measured"]["link"] == {"seconds": 5e-5, "bytes_per_second": 12.5e9}
    alone = CliRunner().invoke(app, ["plan", *STATED, "--longest", "4", "--max-new-tokens", "16"])
    assert "parallel" not in alone.stdout
    assert "Best: --schedule " in alone.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "MODELS: expected some, or --forward-ms and --acceptance in their place"),
        (("--acceptance", ".9,.8"), "MODELS: expected some, or --forward-ms and --acceptance in their place"),
        (("--forward-ms", "20,x", "--acceptance", ".9,.8"), "--forward-ms: expected numbers between commas"),
        (("--forward-ms", "20:1:2,5", "--acceptance", ".9,.8"), "--forward-ms: expected numbers between commas"),
        (("--forward-ms", "20,0", "--acceptance", ".9,.8"), "--forward-ms: expected times above 0"),
        (("--forward-ms", "20:nan,5", "--acceptance", ".9,.8"), "--forward-ms: expected times above 0"),
        (
            ("--forward-ms", "20,5", "--acceptance", ".9"),
            "--acceptance: expected 2 numbers, one for each member; got 1",
        ),
        (("--forward-ms", "20,5", "--acceptance", ".9,2"), "--acceptance: expected numbers from 0 to 1"),
        ((*STATED, "--devices", "0,-1"), "--devices: expected numbers from 0 on"),
        ((*STATED, "--link", "100:20"), "--link: expected --devices beside it"),
        ((*STATED, "--devices", "0,1", "--link", "fast"), "--link: expected GBIT_A_SECOND:MICROSECONDS"),
        ((*STATED, "--devices", "0,1", "--link", "nan:1"), "--link: expected GBIT_A_SECOND:MICROSECONDS"),
        ((*STATED, "--devices", "0,1", "--row-bytes", "9"), "--row-bytes: expected --link beside it"),
        ((*STATED, "--devices", "0,1", "--link", "1:2"), "--link: expected --row-bytes beside it without MODELS"),
        ((*STATED, "--prompt", "w1"), "--prompt: expected MODELS beside it"),
    ],
)
def test_what_cannot_be_planned_for_is_one_clear_line(options, message):
    result = CliRunner().invoke(app, ["plan", *options])
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize("acceptance", [0.2, 0.6, 0.9])
def test_standard_is_picked_where_a_forward_costs_as_much_as_its_tokens(acceptance):
    """As of quantised models on a processor, whose forwards are bound by computing."""
    measured, chosen = even(acceptance, (1.0, 1.0), num_tokens=150), list(candidates(2, 3))
    costs = {indices: GroupCost({1: 1.0, 2: 2.0}, 0.0) for indices in measured.costs}
    predictions = predict_all(replace(measured, costs=costs), chosen)
    best, fastest = pick(predictions), max(one.speedup for one in predictions if one.candidate.schedule != "standard")
    assert (best.candidate.schedule, best.speedup) == ("standard", 1.0)
    assert fastest < WORTHWHILE
    shown = Console(width=200, record=True, file=io.StringIO())
    show_plan(shown, measured, predictions, ["first", "second"])
    said = shown.export_text()
    assert "Best: --schedule standard" in said
    assert f"would run at {fastest:.2f} times the speed of standard" in said
    by_memory = {indices: GroupCost({1: 1.0, 2: 1.1}, 0.0) for indices in measured.costs}
    assert (pick(predict_all(replace(measured, costs=by_memory), chosen)).speedup > 1.2) is (acceptance > 0.5)


def test_prompts_and_the_time_outside_forwards_are_part_of_the_prediction():
    assert predict(even(1.0, (1.0,), 100, prompt=11.0, outside=0.5), Candidate("standard", (1,))).tokens_per_second == (
        pytest.approx(100 / (11.0 + 99 + 100 * 0.5))
    )


def test_standard_does_not_pay_for_a_member_without_a_weight():
    measured = replace(even(1.0, (1.0, 5.0), 100, prompt=3.0), counted=(0,), weights=(1.0, 0.0))
    assert predict(measured, Candidate("standard", (1, 1))).tokens_per_second == pytest.approx(100 / (3.0 + 99))


def test_only_schedules_of_chains_are_predicted():
    with pytest.raises(ValueError, match="schedule: expected standard, fixed, alternate or parallel to predict"):
        predict(even(0.5, (1.0, 1.0)), Candidate("tree", (1, 1)))


@pytest.mark.parametrize(
    "settings",
    [{"tree": (2, 2)}, {"rule": "gumbel"}, {"draft_lens": ByAcceptance(4, cost=0.1)}, {"drafter": PromptLookup()}],
)
def test_an_ensemble_that_is_not_predicted_is_not_measured(members, settings):
    with pytest.raises(ValueError, match="ensemble: expected a member as drafter, chains"):
        measure(SpeculativeEnsemble(members, schedule="fixed", **settings), PROMPT)


def test_candidates_cover_every_drafter_and_mix_lengths_as_far_as_they_are_few():
    assert list(candidates(1, 8)) == [Candidate("standard", (1,))]
    for num_members, mixed in ((2, 8), (3, 4), (4, 3), (7, 1)):
        found = list(candidates(num_members, 8))
        assert len(set(found)) == len(found)
        alternating = [candidate.draft_lens for candidate in found if candidate.schedule == "alternate"]
        assert len(alternating) == mixed**num_members + 8 - mixed + 8 * num_members
        assert len(found) == 1 + 8 * num_members + len(alternating)


@pytest.mark.usefixtures("roughly")
def test_the_command_picks_a_schedule(models):
    job = ["plan", *models, "--prompt", "w5 w3", "--max-new-tokens", "30", "--dtype", "fp32", "--repeats", "1"]
    result = CliRunner().invoke(app, [*job, "--longest", "3", "--json"])
    assert result.exit_code == 0, result.stderr
    values = json.loads(result.stdout)
    rates = [prediction["tokens_per_second"] for prediction in values["predictions"]]
    assert len(rates) == 1 + 2 * 3 + 9 + 2 * 3
    assert rates == sorted(rates, reverse=True)
    assert set(values["measured"]["costs"]) == {"0", "1"}
    assert set(values["measured"]["costs"]["0"]["seconds"]) >= {"1", "2", "8"}
    fastest = values["predictions"][0]
    assert values["best"] == (fastest["options"] if fastest["speedup"] >= WORTHWHILE else "--schedule standard")
    chosen = CliRunner().invoke(app, ["generate", *models, "--prompt", "w5", *values["best"].split(), "--json"])
    assert chosen.exit_code == 0, chosen.stderr
    options = ["--longest", "2", "--drafter", "lookup"]
    shown = CliRunner().invoke(app, [*job, *options], env={"COLUMNS": "80"})
    assert shown.exit_code == 0, shown.stderr
    names = ("standard", "fixed 2, drafter 1", "fixed 1, drafter lookup", "alternate 1,1, drafter 0")
    for word in (*names, "tokens/s", "speed-up", "forwards a token", "ms", "--schedule"):
        assert word in shown.stdout
    wrong = CliRunner().invoke(app, [*job, "--longest", "0"])
    assert wrong.exit_code == 2
    assert "longest" in wrong.stderr


@pytest.mark.usefixtures("roughly")
@pytest.mark.parametrize(("suffix", "begin"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".PDF", b"%PDF")])
def test_the_command_draws_the_kind_of_picture_that_its_name_says(models, tmp_path, suffix, begin):
    picture = tmp_path / f"speedup{suffix}"
    job = ["plan", *models, "--prompt", "w5 w3", "--max-new-tokens", "8", "--dtype", "fp32", "--repeats", "1"]
    result = CliRunner().invoke(app, [*job, "--longest", "2", "--samples", "1", "--plot", str(picture)])
    assert result.exit_code == 0, result.stderr
    content = picture.read_bytes()
    assert content.startswith(begin)
    if suffix == ".png":
        width, height = (int.from_bytes(content[start : start + 4], "big") for start in (16, 20))
        assert (width, height) == (1500, 630)


@pytest.mark.parametrize("name", ["speedup", "speedup.xyz", "speedup.png.txt", ".png"])
def test_a_picture_of_no_known_kind_is_refused_before_anything_is_loaded(monkeypatch, models, tmp_path, name):
    monkeypatch.setattr("specens.engines.transformers.loader.load_model", None)
    result = CliRunner().invoke(app, ["plan", *models, "--prompt", "w5", "--plot", str(tmp_path / name)])
    assert result.exit_code == 2
    assert "--plot: expected a name that ends in one of ." in result.stderr


def test_a_picture_has_whole_draft_lengths_and_says_of_what_it_is(monkeypatch, members, tmp_path):
    from matplotlib import pyplot

    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    ensemble = SpeculativeEnsemble(members[:2])
    title = picture_title(["a/m-small", "b/m-large"], Sampling(0.7, top_p=0.9), ensemble)
    predictions = predict_all(even(0.8, (1.0, 1.0)), list(candidates(2, 3)))
    plot_speedups(tmp_path / "speedup.png", predictions, {}, ["first", "second"], title)
    (figure,) = figures
    assert figure.get_suptitle() == "m-small and m-large\ntemperature 0.7, top_p 0.9, float32"
    low, high = figure.axes[0].get_xlim()
    assert [tick for tick in figure.axes[0].get_xticks() if low <= tick <= high] == [1, 2, 3]


@pytest.mark.usefixtures("roughly")
def test_lines_of_the_picture_are_the_predictions(members):
    measured = measure_all(members[:2], list(candidates(2, 3)), 1, SAMPLING)
    predictions = predict_all(measured, list(candidates(2, 3)))
    lines = speedups_by_length(predictions, ["first", "second"])
    begins = {f"alternate, {name} begins" for name in ("first", "second")}
    assert set(lines) == {"alternate", "fixed, first drafts", "fixed, second drafts"} | begins
    for prediction in predictions:
        if str(prediction.candidate) == "fixed 2, drafter 1":
            assert lines["fixed, second drafts"][2] == prediction.speedup
    assert all(sorted(line) == [1, 2, 3] for line in lines.values())
    ensemble = SpeculativeEnsemble(members[:2])
    settings = {"max_new_tokens": 40, "samples": 1, "sampling": SAMPLING}
    by_weight = measure_weights(ensemble, measured, PROMPT, **settings)
    lines = speedups_by_weight(by_weight, 2, ["first", "second"])
    assert all(sorted(line) == list(by_weight) == [0.1, 0.3, 0.5, 0.7, 0.9] for line in lines.values())
    acceptance = [by_weight[weight].mean_acceptance() for weight in by_weight]
    assert acceptance[0][0] < acceptance[-1][0]
    assert acceptance[0][1] > acceptance[-1][1]
    contrast = SpeculativeEnsemble(members[:2], ensemble=Contrastive(0.2))
    assert measure_weights(contrast, measured, PROMPT, **settings) == {}


def test_a_picture_without_matplotlib_is_one_clear_line(monkeypatch, models, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    job = ["plan", *models, "--prompt", "w5", "--dtype", "fp32", "--plot", str(tmp_path / "speedup.png")]
    result = CliRunner().invoke(app, job)
    assert result.exit_code == 1
    assert "--plot: expected matplotlib; install it, or specens-kernels with the extra plot" in result.stderr
    assert result.stderr.count("\n") == 1
