"""Replacement rules, decision trees and threshold acceptance of the backends against the reference, token by token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import many, operator_arguments, tensors_of
from packed import assert_equal, buffers, ragged, verify_packed
from problems import Judge, Problem, random_problem
from torch import Tensor
from trees_of_decisions import random_decision_tree

import specens_kernels.ops.verify_chain as operation
from specens_kernels import DecisionTree, Mixture, Replacement, Sampling, Status, Threshold, Verdict, verify_chain

ALWAYS = DecisionTree((-1,), (0.0,), (-1,), (-1,), (True,))
NEVER = DecisionTree((-1,), (0.0,), (-1,), (-1,), (False,))


def with_rule(problem: Problem, seed: int) -> Problem:
    """The problem under one of these rules, with a drafter where the rule needs one."""
    rules = [
        "replacement",
        Replacement(0.9, 0.3),
        Replacement(1.0, 1.2),
        random_decision_tree(seed, 1 + 2 * (seed % 40)),
        ALWAYS,
        NEVER,
        Threshold(0.3),
        Threshold(0.05),
    ]
    arguments = problem.arguments | {"rule": rules[seed % len(rules)]}
    if not isinstance(arguments["rule"], Threshold) and not {"drafter", "draft_logits"} & set(arguments):
        arguments["drafter"] = 0
    return replace(problem, arguments=arguments)


def test_cpp_decides_as_the_reference():
    judge, accepted, rejected = Judge(), 0, 0
    for seed in range(many(200)):
        problem = with_rule(random_problem(seed, (1, 2, 7, 33, 1500)), seed)
        expected = problem.verify("reference")
        judge.compare(problem, problem.verify("cpp"), expected, seed)
        accepted += int(expected.num_accepted.sum())
        rejected += int((expected.num_accepted < problem.tokens.shape[1]).sum())
    judge.finish(at_least=400)
    assert min(accepted, rejected) > 100


def small_problems(count: int, seed: int) -> Iterator[tuple[int, Problem]]:
    """Of at most four rows, since Triton's interpreter is slow, with at least one draft; each rule in turn."""
    for index in range(count):
        while True:
            problem = with_rule(random_problem(seed, (7, 33)), index)
            batch, rows = problem.logits[0].shape[:2]
            seed += 1
            if 0 < batch * rows <= 4 and problem.tokens.shape[1] > 0:
                break
        yield seed, problem


def test_triton_decides_as_the_reference():
    judge = Judge()
    for seed, problem in small_problems(many(10), 1000):
        judge.compare(problem, problem.verify("triton"), problem.verify("reference"), seed)
    judge.finish(at_least=10)


@pytest.mark.parametrize("bonus", [True, False], ids=["bonus", "no bonus"])
def test_cpp_gives_packed_rows_and_buffers_the_verdict_of_dense_ones(bonus):
    for seed in range(40):
        requests = ragged(seed, bonus)
        requests = replace(requests, problem=with_rule(requests.problem, seed))
        dense = requests.problem.verify("cpp")
        assert_equal(verify_packed(requests, "cpp", padding=seed % 3), dense)
        out = buffers(dense)
        assert verify_packed(requests, "cpp", out=out) is out
        assert_equal(out, dense)


def test_triton_takes_packed_rows_and_buffers():
    requests = next(found for seed in range(3000, 4000) if sum((found := ragged(seed, True)).num_rows) in (3, 4))
    for index in (0, 3):
        own = replace(requests, problem=with_rule(requests.problem, index))
        dense = own.problem.verify("triton")
        out = buffers(dense)
        assert_equal(verify_packed(own, "triton", out=out), dense)
        assert_equal(dense, own.problem.verify("reference")._replace(logprobs=dense.logprobs))


def decided(backend: str, logits: Any, tokens: Any, draft_logits: Any, **arguments: Any) -> tuple[list, list]:
    tensors = torch.tensor(logits), torch.tensor(tokens)
    arguments = {"rule": "replacement"} | arguments
    verdict = verify_chain(*tensors, draft_logits=torch.tensor(draft_logits), backend=backend, **arguments)
    return verdict.tokens.tolist(), verdict.status.tolist()


BACKENDS = ["reference", "cpp", "triton"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_a_token_end_the_round_and_others_are_unaffected(backend):
    dead, row = [-torch.inf] * 4, [0.0, 3.0, 1.0, 0.0]
    drafts = [[[0.0] * 4] * 2] * 3
    tokens, status = decided(backend, [[dead, row, row], [row, dead, row], [row, row, row]], [[1, 1]] * 3, drafts)
    assert tokens == [[-1, -1, -1], [1, -1, -1], [1, 1, 1]]
    assert status == [Status.NO_TOKEN, Status.NO_TOKEN, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_draft_distribution_that_cannot_be_used_counts_as_one_hot(backend):
    """Of probability 1, so that a draft is kept; a token that is not the vocabulary's ends the chain."""
    row, sure, unsure = [0.0, 3.0, 1.0, 0.0], [-torch.inf] * 4, [0.0] * 4
    logits, drafts = [[row, row, row]] * 4, [[sure, unsure], [unsure, sure], [[torch.nan] * 4] * 2, [unsure, unsure]]
    tokens, status = decided(backend, logits, [[2, 1], [2, 1], [2, 2], [1, -1]], drafts)
    assert tokens == [[2, 1, 1], [1, -1, -1], [2, 2, 1], [1, 1, -1]]
    unusable = Status.INVALID_DRAFT_DISTRIBUTION
    assert status == [unusable, 0, unusable | Status.NAN_LOGITS, Status.INVALID_DRAFT_TOKEN]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_temperature_that_is_none_is_a_status_of_its_request(backend):
    sampling, draft_sampling = (Sampling(temperature=torch.tensor([1.0, 0.0, 0.5, 2.0])) for _ in range(2))
    sampling.temperature[1], draft_sampling.temperature[2] = -1.0, torch.nan  # after the check
    arguments = {"sampling": sampling, "draft_sampling": draft_sampling}
    row, drafts = [[0.0, 3.0, 1.0]], [[[0.0, 0.0, 0.0]]] * 4
    tokens, status = decided(backend, [row] * 4, [[2]] * 4, drafts, **arguments)
    assert tokens == [[1, -1], [-1, -1], [-1, -1], [1, -1]]
    assert status == [0, Status.INVALID_PARAMETER, Status.INVALID_PARAMETER, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_drafts_beyond_the_vocabulary_of_the_assistant_are_replaced(backend):
    drafts = [[[0.0, 0.0, 0.0, 9.0, 9.5]]]
    assert decided(backend, [[[0.0, 1.0, 0.0]]], [[4]], drafts) == ([[1, -1]], [0])
    assert decided(backend, [[[0.0, 1.0, 0.0]]], [[5]], drafts) == ([[1, -1]], [Status.INVALID_DRAFT_TOKEN])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
def test_the_token_that_replaces_is_the_most_likely_after_the_filters_of_members(backend, temperature):
    """Before them token 1 is the most likely of the mixture, but no member keeps it."""
    members = [torch.tensor([[[3.0, 2.9, 0.0]]]), torch.tensor([[[0.0, 2.9, 3.1]]])]
    ensemble = Mixture((0.5, 0.5), filter="members")
    arguments = {"ensemble": ensemble, "sampling": Sampling(temperature, top_k=1), "rule": ALWAYS, "drafter": 0}
    verdict = verify_chain(members, torch.tensor([[1]]), backend=backend, **arguments)
    assert verdict.tokens.tolist() == [[0, -1]]
    assert float(members[0].softmax(-1)[0, 0, 1] + members[1].softmax(-1)[0, 0, 1]) > 0.9


@pytest.mark.parametrize("backend", BACKENDS)
def test_drafts_that_tie_with_the_most_likely_token_differ_from_it(backend):
    assert decided(backend, [[[0.0, 1.0, 1.0]]], [[2]], [[[0.0, 0.0, 0.0]]])[0] == [[1, -1]]
    assert decided(backend, [[[0.0, 1.0, 1.0]]], [[1]], [[[0.0, 0.0, 0.0]]])[0] == [[1, -1]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_on_a_threshold_keep_the_draft_and_go_left(backend):
    """All probabilities are exact: the draft's is 1/2, the assistant's 1/2."""
    half, drafts = [[[-torch.inf, 0.0, 0.0]]], [[[0.0, -torch.inf, 0.0]]]
    tree = DecisionTree((0, -1, 1, -1, -1), (0.25, 0, 0.5, 0, 0), (1, -1, 3, -1, -1), (2, -1, 4, -1, -1), (True,) * 5)
    left_only = replace(tree, replace=(True, True, True, False, True))
    for rule, emitted in (
        (Replacement(0.5, 0.0), 2),
        (Replacement(0.75, 1.0), 2),
        (Replacement(0.75, 0.75), 1),
        (tree, 1),
        (left_only, 2),
        (Threshold(0.5), 2),
    ):
        random_numbers = {"uniforms": torch.tensor([[0.0, 0.0]])}
        assert decided(backend, half, [[2]], drafts, rule=rule, **random_numbers)[0] == [[emitted, -1]], rule


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", ["replacement", Replacement(), ALWAYS], ids=lambda rule: type(rule).__name__)
def test_a_rule_that_compares_needs_the_drafts_probabilities(backend, rule):
    logits, tokens = torch.zeros(1, 2, 3), torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"^drafter: expected .*got None"):
        verify_chain(logits, tokens, rule=rule, backend=backend)
    with pytest.raises(ValueError, match=r"^seeds: expected .*got None"):
        verify_chain(logits, tokens, drafter=0, rule=Threshold(0.5), backend=backend)


@pytest.mark.parametrize("rule", ["threshold", "decision_tree", DecisionTree, [Replacement()]])
def test_what_is_no_rule_is_refused_by_name(rule):
    with pytest.raises(ValueError, match=r"^rule: expected"):
        verify_chain(torch.zeros(1, 2, 3), torch.zeros(1, 1, dtype=torch.int64), drafter=0, rule=rule)


@pytest.mark.parametrize(
    "table",
    [
        (),
        (-1.0, 0, 0, 0),
        (2.0, 0, 1, 1, 0),
        (0.0, 0.5, 0, 1, 0, -1.0, 0, 1, 1, 0),
        (0.0, 0.5, 1, 2, 0, -1.0, 0, 1, 1, 0),
    ],
)
def test_the_cpp_operator_refuses_a_tree_that_cannot_be_walked(table):
    def call(backend: str) -> Verdict:
        return verify_chain(torch.zeros(1, 2, 3), torch.zeros(1, 1).long(), drafter=0, rule=ALWAYS, backend=backend)

    given, options = operator_arguments(operation, call)
    rule = [options["rule"][0], *table]
    with pytest.raises(ValueError, match=r"decision tree|children"):
        torch.ops.specens.verify_chain(*given, **(options | {"rule": rule}))


def test_the_operators_keep_their_contract_with_a_decision_tree():
    requests = ragged(5, bonus=True)
    requests = replace(requests, problem=with_rule(requests.problem, 3))
    assert isinstance(requests.problem.arguments["rule"], DecisionTree)
    arguments = operator_arguments(operation, lambda backend: verify_packed(requests, backend))
    operator = torch.ops.specens.verify_chain.default
    assert set(torch.library.opcheck(operator, *arguments).values()) == {"SUCCESS"}


def test_the_rules_compile_to_one_graph():
    tree = random_decision_tree(2, 9)

    def step(logits: Tensor, tokens: Tensor, outside: Tensor, temperatures: Tensor, seeds: Tensor) -> tuple:
        arguments = {"draft_logits": outside, "sampling": Sampling(temperatures), "backend": "cpp", "logprobs": True}
        verdicts = [verify_chain(logits, tokens, rule=tree, **arguments)]
        verdicts.append(verify_chain(logits, tokens, rule=Threshold(0.1), seeds=seeds, positions=seeds, **arguments))
        return tuple(value for verdict in verdicts for value in tensors_of(verdict))

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for batch in (2, 3):
        generator = torch.Generator().manual_seed(batch)
        logits = torch.randn(batch, 3, 9, generator=generator) * 2
        tokens = torch.randint(9, (batch, 2), generator=generator)
        arguments = (logits, tokens, logits[:, :2].flip(-1), torch.arange(batch) * 0.5, torch.arange(batch))
        for own, expected in zip(compiled(*arguments), step(*arguments), strict=True):
            assert torch.equal(own, expected)
