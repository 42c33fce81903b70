"""Measuring schedules against each other, and what acceptance rates allow."""

import io
import itertools

import pytest
from driver.tiny_models import PROMPT, relative_of, tiny_llama
from rich.console import Console
from specens import MemberPrompts, SpeculativeEnsemble
from specens.analysis.compare import compare, with_other_schedules
from specens.cli.display import comparison_table
from specens.decoding.ideal import alternate_speedup, fixed_speedup, fixed_speedup_without_bonus
from specens.engines.transformers.causal_lm import CausalLM
from specens.engines.transformers.member import Member

from specens_kernels import Mixture


@pytest.fixture(scope="module")
def standard():
    first = tiny_llama(0, eos_token_id=9)
    return SpeculativeEnsemble([first, relative_of(first, 1, noise=0.2)], schedule="standard", draft_lens=1)


def test_runs_are_interleaved_and_all_of_the_length_asked_for(standard):
    runs = []
    comparison = compare(
        with_other_schedules(standard, fixed_draft_len=3),
        PROMPT,
        max_new_tokens=20,
        repeats=2,
        on_run=lambda schedule, repeat: runs.append((repeat, schedule)),
    )
    assert runs == list(itertools.product(range(3), ["standard", "fixed", "alternate"]))
    assert [row.schedule for row in comparison.rows] == ["standard", "fixed", "alternate"]
    assert not comparison.interrupted
    for row in comparison.rows:
        assert [run["emitted"] for run in row.runs] == [20, 20]
        low, high = row.tokens_per_second_range
        assert low <= row.tokens_per_second <= high
        assert row.forward_ms > 0
        assert 0 < row.other_share < 1
    baseline, fixed, alternate = comparison.rows
    assert (baseline.speedup, baseline.ideal_speedup, baseline.acceptance_rate) == (1.0, 1.0, None)
    assert baseline.forwards == [20, 20]
    assert fixed.draft_lens == [3, 3]
    assert fixed.paper_speedup < fixed.ideal_speedup
    assert alternate.ideal_speedup == alternate_speedup(alternate.acceptance_rate)
    assert sum(alternate.forwards) < sum(baseline.forwards)


def test_engines_are_compared_each_with_its_own_standard(standard):
    others = [tiny_llama(0, eos_token_id=9), tiny_llama(3)]
    second = SpeculativeEnsemble([CausalLM(model) for model in others], schedule="standard", draft_lens=1)
    for model in second.models:
        model.name = "other"
    ensembles = [*with_other_schedules(standard), *with_other_schedules(second)]
    comparison = compare(ensembles, PROMPT, max_new_tokens=10, repeats=1)
    assert [row.engine for row in comparison.rows] == ["transformers"] * 3 + ["other"] * 3
    assert {finding.split(":")[0] for finding in comparison.findings[:-1]} == {"transformers", "other"}
    times = comparison.rows[3].tokens_per_second / comparison.rows[0].tokens_per_second
    assert comparison.findings[-1].startswith("other writes ")
    assert comparison.findings[-1].endswith(f"and {times:.2f} times under standard.")
    assert "other: alternate 1" in table_text(comparison)


def table_text(comparison):
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(comparison_table(comparison))
    return console.export_text()


def test_findings_say_whether_speculation_pays(standard):
    comparison = compare(with_other_schedules(standard), PROMPT, max_new_tokens=10, repeats=1)
    best = max(comparison.rows[1:], key=lambda row: row.speedup)
    if best.speedup >= 1.02:
        assert f"{best.schedule} writes {best.speedup:.2f} times as many" in comparison.findings[0]
    else:
        assert comparison.findings[0].startswith("Speculation does not pay here")
    explained = [
        row.schedule for row in comparison.rows if row.ideal_speedup and row.speedup < 0.85 * row.ideal_speedup
    ]
    assert [finding.split()[0] for finding in comparison.findings[1:-1]] == explained
    assert comparison.findings[-1].endswith(f"the ideal of fixed would be {comparison.rows[1].paper_speedup:.2f}.")


def test_trees_are_compared_where_they_are_asked_for(standard):
    comparison = compare(with_other_schedules(standard, tree=(2, 2)), PROMPT, max_new_tokens=10, repeats=1)
    assert [row.schedule for row in comparison.rows] == ["standard", "fixed", "alternate", "tree", "alternate-tree"]
    assert [row.tree for row in comparison.rows] == [None, None, None, "2,2", "2,2"]
    assert comparison.rows[-1].ideal_speedup is None
    trees = comparison.rows[-2]
    assert (trees.ideal_speedup, trees.paper_speedup) == (None, None)
    assert 0 < trees.acceptance_rate <= 1
    assert trees.forwards[1] <= 10


def test_the_schedules_that_are_named_are_compared(standard):
    chosen = with_other_schedules(standard, schedules=["parallel", "fixed"])
    comparison = compare(chosen, PROMPT, max_new_tokens=10, repeats=1)
    assert [row.schedule for row in comparison.rows] == ["standard", "parallel", "fixed"]
    assert comparison.rows[1].ideal_speedup is None  # members of one process
    for wrong, message in (
        ({"schedules": ["jacobi"]}, "schedules: "),
        ({"schedules": ["fixed"], "tree": (2,)}, "tree: "),
        ({"schedules": ["alternate"], "fixed_draft_len": 2}, "fixed_draft_len: "),
    ):
        with pytest.raises(ValueError, match=message):
            with_other_schedules(standard, **wrong)


def test_two_rules_are_shown_side_by_side(standard):
    comparison = compare(
        with_other_schedules(standard, rules=("token", "gumbel")), PROMPT, max_new_tokens=10, repeats=1
    )
    shown = [(row.schedule, row.rule) for row in comparison.rows]
    speculating = [(schedule, rule) for schedule in ("fixed", "alternate") for rule in ("token", "gumbel")]
    assert shown == [("standard", "token"), *speculating]
    named = list(comparison_table(comparison).columns[0].cells)
    assert named[1:] == ["fixed 1 token", "fixed 1 gumbel", "alternate 1 token", "alternate 1 gumbel"]


def test_members_that_share_weights_are_called_hard_to_beat():
    shared = SpeculativeEnsemble([tiny_llama(0)] * 2, schedule="standard")
    comparison = compare(with_other_schedules(shared), MemberPrompts([PROMPT, [1, 2]]), max_new_tokens=10, repeats=1)
    assert any("Members share weights" in finding for finding in comparison.findings)


def test_three_members_are_compared_and_one_is_not(standard):
    members = [model.model for model in standard.models]
    three = SpeculativeEnsemble([*members, relative_of(members[0], 2)], schedule="standard")
    comparison = compare(with_other_schedules(three), PROMPT, max_new_tokens=20, repeats=1)
    assert [row.schedule for row in comparison.rows] == ["standard", "fixed", "alternate"]
    assert comparison.rows[2].ideal_speedup == alternate_speedup(comparison.rows[2].acceptance_rate, 3)
    with pytest.raises(ValueError, match="expected two members or more to compare schedules"):
        with_other_schedules(SpeculativeEnsemble(members[:1], schedule="standard"))


def test_ctrl_c_keeps_the_complete_runs(monkeypatch, standard):
    started, score = [], Member.score

    def interrupted_score(self, sequence, rows):
        if started[-1] == ("fixed", 2) and len(sequence) > 5:
            raise KeyboardInterrupt
        return score(self, sequence, rows)

    monkeypatch.setattr(Member, "score", interrupted_score)
    comparison = compare(
        with_other_schedules(standard), PROMPT, max_new_tokens=10, repeats=3, on_run=lambda *run: started.append(run)
    )
    assert comparison.interrupted
    assert [len(row.runs) for row in comparison.rows] == [2, 1, 1]


def test_ideals_are_those_of_counting_forwards():
    for acceptance in (0.0, 0.3, 0.85, 1.0):
        assert alternate_speedup(acceptance) == pytest.approx(2 / (2 - acceptance))
        for num_members in (2, 3, 5):
            forwards = acceptance * 1 + (1 - acceptance) * num_members
            assert alternate_speedup(acceptance, num_members) == pytest.approx(num_members / forwards)
        for draft_len, cost in itertools.product((1, 2, 5), (0.1, 1.0)):
            chances = [acceptance**j * (1 - acceptance) for j in range(draft_len)] + [acceptance**draft_len]
            emitted = sum(chance * (min(j, draft_len) + 1) for j, chance in enumerate(chances))
            spent = 1 + cost * draft_len + cost * acceptance**draft_len
            assert fixed_speedup(draft_len, acceptance, cost) == pytest.approx(emitted * (1 + cost) / spent)
            if acceptance < 1:
                paper = (1 - acceptance**draft_len) * (1 + cost) / ((1 - acceptance) * (1 + cost * draft_len))
                assert fixed_speedup_without_bonus(draft_len, acceptance, cost) == pytest.approx(paper)
                assert fixed_speedup(draft_len, acceptance, cost) > paper * (1 - 1e-12)
    assert fixed_speedup_without_bonus(1, 0.9, 1.0) == pytest.approx(1.0)


def test_the_ideal_of_a_drafter_without_a_weight_counts_its_forwards():
    first = tiny_llama(0)
    members = [first, relative_of(first, 1, noise=0.2)]
    alone = SpeculativeEnsemble(members, ensemble=Mixture((1.0, 0.0)), schedule="fixed", drafter=1)
    standard, fixed = compare(with_other_schedules(alone, 3), PROMPT, max_new_tokens=40, repeats=2).rows[:2]
    assert standard.forwards == [40, 0]
    assert fixed.paper_speedup is None
    emitted = sum(fixed.acceptance_rate**row for row in range(4))
    assert fixed.ideal_speedup < 0.75 * emitted  # a forward of a drafter of the same size costs about one of the target
    assert fixed.ideal_speedup > emitted / (1 + 3 * 3.0)
