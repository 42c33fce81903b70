"""Rows cut into shards get the results of whole rows, on every rank, for all that the operations take."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import FULL, many
from packed import packed_arguments, ragged
from problems import LOGPROBS, Judge, Problem, random_problem
from shards import assert_alike, bounds_of, in_lockstep, on_shards, slice_of, widest
from torch import Tensor
from tree_cases import TreeCase, hangs_on_the_last_bits, random_case
from trees_of_decisions import random_decision_tree

from bench import distributed as counted
from bench.gpu import traffic
from specens_kernels import (
    Contrastive,
    LogitMixture,
    Mixture,
    Processing,
    Replacement,
    Sampling,
    Synthetic,
    Threshold,
    TokenTree,
    distributed,
    sample,
    target_logprobs,
    verify_chain,
    verify_tree,
)
from specens_kernels.distributed import local, operations, target, tree_runs
from specens_kernels.distributed.filters import MOST_CANDIDATES
from specens_kernels.distributed.groups import Exchange
from specens_kernels.ops.verify_tree.rules import sequential_ratio

ROOT = Path(__file__).parents[2]
VOCABS = (1, 2, 33, 200, 700)
NEEDS_DRAFT = ("drafter", "draft_logits")
README_COLUMNS = {  # and the settings that are counted
    "gumbel, greedy": "rule gumbel",
    "token": "rule token",
    "block": "rule block",
    "token, top-k 50, top-p": "rule token, top-k 50, top-p",
    "token, top-p": "rule token, top-p",
}
OF_DRAFTS = (*NEEDS_DRAFT, "draft_sampling", "siblings", "uniforms")


def assert_equal(result: Any, expected: Any, name: object) -> None:
    """Equal but for the rounding of log-probabilities."""
    for field, own, other in zip(expected._fields, result, expected, strict=True):
        assert (own is None) == (other is None), (name, field)
        if own is not None and own.is_floating_point():
            torch.testing.assert_close(own, other, **LOGPROBS, msg=lambda text, field=field: f"{name} {field}: {text}")
        elif own is not None:
            assert torch.equal(own, other), (name, field, own, other)


def any_rule(problem: Problem, choice: random.Random, seed: int) -> Problem:
    """The same, at times under a rule that compares, or with other reports."""
    arguments = dict(problem.arguments)
    rules: list[Any] = [Threshold(0.2)]
    if any(arguments.get(name) is not None for name in NEEDS_DRAFT):
        rules += [Replacement(0.6, 0.4), random_decision_tree(seed, 7)]
    if choice.random() < 0.3:
        arguments["rule"] = choice.choice(rules)
    if choice.random() < 0.3:
        arguments |= {"logprobs": choice.choice(["raw", "target"]), "top_logprobs": choice.choice([0, 3])}
    return replace(problem, arguments=arguments)


def on_random_shards(problem: Problem, choice: random.Random) -> Any:
    bounds = bounds_of(widest(problem.logits, problem.arguments), choice.choice([1, 2, 3, 4]), choice)
    results, _ = on_shards(operations.chain_of, problem.logits, problem.tokens, bounds=bounds, **problem.arguments)
    assert_alike(results)
    return results[0]


@contextmanager
def read_in_torch(monkeypatch: Any, alone: bool) -> Iterator[None]:
    """alone: whether no kernel reads slices."""
    with monkeypatch.context() as own:
        if alone:
            own.setattr(local, "operator_for", lambda *_: None)
        yield


def test_random_chains_on_shards_get_the_verdict_of_whole_rows(monkeypatch):
    judge = Judge()
    for seed in range(many(80)):
        choice = random.Random(seed)
        problem = any_rule(random_problem(seed, VOCABS), choice, seed)
        with read_in_torch(monkeypatch, seed % 2 == 1):
            result, expected = on_random_shards(problem, choice), problem.verify("reference")
        assert_equal(result, expected, seed)
        judge.compare(problem, problem.verify("cpp"), result, seed)
    judge.finish(at_least=80)


def of_gumbel(problem: Problem, seed: int) -> Problem:
    """The same under the rule gumbel, its drafts mostly those that are accepted."""
    batch = len(problem.tokens)
    arguments = {name: value for name, value in problem.arguments.items() if name not in OF_DRAFTS}
    arguments |= {"rule": "gumbel", "seeds": torch.arange(batch) + seed, "positions": torch.arange(batch) * 2**33}
    arguments |= {"logprobs": (False, True, "raw")[seed % 3]}
    tokens = problem.tokens
    for _ in range(2):
        emitted = verify_chain(problem.logits, tokens, backend="reference", **arguments).tokens[:, :-1]
        tokens = torch.where(emitted >= 0, emitted, tokens)
    return Problem(problem.logits, tokens, arguments)


def test_chains_by_gumbel_scores_get_the_verdict_of_whole_rows(monkeypatch):
    accepted = 0
    for seed in range(many(40)):
        problem = of_gumbel(random_problem(seed, VOCABS), seed)
        expected = problem.verify("reference")
        with read_in_torch(monkeypatch, seed % 2 == 1):
            assert_equal(on_random_shards(problem, random.Random(seed)), expected, seed)
        accepted += int(expected.num_accepted.sum())
    assert accepted > many(40) / 2


def by_k_seq(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"rule": "k_seq"} | ({"siblings": "with_replacement"} if "siblings" in arguments else {})


def test_random_trees_on_shards_get_the_verdict_of_whole_rows(monkeypatch):
    for seed in range(many(60)):
        choice, case = random.Random(seed), random_case(seed)
        arguments = dict(case.arguments)
        if seed % 5 == 0:
            arguments = {name: value for name, value in arguments.items() if name not in OF_DRAFTS}
            numbers = torch.arange(len(case.draft_tokens)) + seed
            arguments |= {"rule": "gumbel", "seeds": numbers, "positions": numbers}
        if seed % 5 > 2:
            arguments |= by_k_seq(arguments)
        bounds = bounds_of(widest(case.member_logits, arguments), choice.choice([1, 2, 3, 4]), choice)
        given = (case.member_logits, case.draft_tokens, case.parents)
        with read_in_torch(monkeypatch, seed % 2 == 1):
            results, _ = on_shards(operations.tree_of, *given, bounds=bounds, **arguments)
        assert_alike(results)
        assert_equal(results[0], verify_tree(*given, backend="reference", **arguments), seed)


def trees_by_kernels(monkeypatch: Any, backend: str, cases: list[TreeCase]) -> tuple[int, int]:
    """How many trees kernels have read, all of which get the tokens of whole rows; and of accepted tokens."""
    if backend == "triton":
        by_triton(monkeypatch)
        monkeypatch.setattr(local, "takes_a_drafter_a_node", lambda _: False)
    operators, calls, read, accepted = local.operator_for, [], 0, 0
    monkeypatch.setattr(local, "operator_for", lambda *given: calls.append(given[0]) or operators(*given))
    for seed, case in enumerate(cases):
        given, arguments, choice = (
            (case.member_logits, case.draft_tokens, case.parents),
            case.arguments,
            random.Random(seed),
        )
        bounds = bounds_of(widest(case.member_logits, arguments), choice.choice([1, 2, 3, 4]), choice)
        calls.clear()
        results, _ = on_shards(operations.tree_of, *given, bounds=bounds, **arguments)
        read += "residual_of_shard" in calls
        assert_alike(results)
        own, expected = results[0], case.verify("reference")
        same = (own.tokens == expected.tokens).all(1) & (own.status == expected.status)
        for request in (~same).nonzero()[:, 0].tolist():
            assert hangs_on_the_last_bits(case, request, own.tokens[request].tolist()), (seed, request)
        assert torch.equal(own.path[same], expected.path[same])
        torch.testing.assert_close(own.logprobs[same], expected.logprobs[same], **LOGPROBS)
        accepted += int(expected.num_accepted.sum())
    return read, accepted


def some_trees(backend: str, count: int, vocab: int) -> list[TreeCase]:
    """Of Triton, in its interpreter, a few small ones: chosen children, and such drawn without replacement."""
    if backend == "triton":
        return [random_case(seed, (2,), (vocab,), (3, 6)) for seed in (6, 10, 13)]
    return [random_case(seed, vocabs=(vocab,)) for seed in range(many(count))]


def by_rule(case: TreeCase, rule: str, filters: tuple[dict[str, Any], ...] = ({}, {})) -> TreeCase:
    """The same under a rule. filters: of the target and of its drafts."""
    arguments = case.arguments | {"rule": rule, "sampling": Sampling(0.9, **filters[0])}
    if rule == "k_seq":
        arguments |= by_k_seq(arguments)
    if arguments.get("draft_sampling") is not None:
        arguments["draft_sampling"] = Sampling(0.7, **filters[1])
    return replace(case, arguments=arguments)


@pytest.mark.parametrize(
    ("backend", "vocab", "rule"),
    [
        *(("cpp", 90, "token"), ("cpp", 90, "traversal"), ("cpp", 5003, "traversal"), ("cpp", 700, "typical")),
        *(("cpp", 5003, "k_seq"), ("triton", 90, "k_seq")),
        *(("triton", 90, "token"), ("triton", 40, "traversal"), ("triton", 90, "typical")),
    ],
)
def test_kernels_read_slices_of_trees_as_torch_does(backend, vocab, rule, monkeypatch):
    """Children that were drawn, with and without replacement, by one member or several, or chosen."""
    cases = [by_rule(case, rule) for case in some_trees(backend, 16 if vocab < 5000 else 6, vocab)]
    read, accepted = trees_by_kernels(monkeypatch, backend, cases)
    assert read > len(cases) / 2
    assert accepted > (len(cases) if backend == "cpp" else 0)


@pytest.mark.parametrize(
    ("backend", "rule"),
    [("cpp", "token"), ("cpp", "traversal"), ("cpp", "typical"), ("cpp", "k_seq"), ("triton", "token")],
)
def test_kernels_filter_slices_of_trees_as_torch_does(backend, rule, monkeypatch):
    filters: list[dict[str, Any]] = [{"top_k": 3, "top_p": 0.8}, {"min_p": 0.1}, {"top_p": 0.9}, {}]
    cases = [
        by_rule(case, rule, (filters[index % 4], filters[(index + 1) % 4]))
        for index, case in enumerate(some_trees(backend, 16, 700 if backend == "cpp" else 90))
    ]
    read, accepted = trees_by_kernels(monkeypatch, backend, cases)
    assert read > len(cases) / 2
    assert accepted > (len(cases) if backend == "cpp" else 0)


def target_of(problem: Problem) -> dict[str, Any]:
    return {name: problem.arguments.get(name) for name in ("ensemble", "sampling", "processing", "allowed")}


def test_random_draws_on_shards_are_those_of_whole_rows(monkeypatch):
    methods: list[dict[str, Any]] = [{}, {"method": "gumbel"}, {"method": "gumbel", "count": 5}]
    for seed in range(many(45)):
        choice, problem = random.Random(seed), random_problem(seed, VOCABS)
        if problem.logits[0].shape[1] == 0:
            continue
        own = target_of(problem)
        if own["allowed"] is not None:
            own["allowed"] = own["allowed"][:, 0]
        numbers = torch.arange(len(problem.tokens)) + seed
        arguments = {**own, **methods[seed % 3], "seeds": numbers, "positions": numbers, "step": seed % 4}
        arguments |= {"logprobs": choice.choice([False, True, "raw"]), "top_logprobs": choice.choice([0, 0, 3])}
        rows = [values[:, 0] for values in problem.logits]
        bounds = bounds_of(widest(rows, {}), choice.choice([1, 2, 3, 4]), choice)
        with read_in_torch(monkeypatch, seed % 2 == 1):
            results, _ = on_shards(operations.draw_of, rows, bounds=bounds, **arguments)
        assert_alike(results)
        assert_equal(results[0], sample(rows, backend="reference", **arguments), seed)


@pytest.mark.parametrize(
    ("backend", "filters"),
    [*(("cpp", own) for own in ({}, {"top_k": 6}, {"top_p": 0.8})), ("triton", {}), ("triton", {"top_k": 6})],
    ids=str,
)
def test_kernels_find_several_best_tokens_of_slices(filters, backend, monkeypatch):
    """Of requests by Gumbel scores and greedy ones, also more tokens than there are."""
    if backend == "triton":
        by_triton(monkeypatch)
    operators, calls = local.operator_for, []
    monkeypatch.setattr(local, "operator_for", lambda *given: calls.append(given[0]) or operators(*given))
    for seed, vocab in enumerate((3, 300, 700) if backend == "cpp" else (140,)):
        numbers = torch.Generator().manual_seed(seed)
        rows = [torch.randn(4, vocab, generator=numbers).mul(3).bfloat16() for _ in range(2)]
        for count, temperature in ((4, torch.tensor([0.7, 0.0, 1.3, 0.0])), (9, 0.8))[: 2 if backend == "cpp" else 1]:
            arguments = {"ensemble": LogitMixture((1.0, -0.4)), "sampling": Sampling(temperature, **filters)}
            arguments |= {"method": "gumbel", "count": count, "seeds": torch.arange(4), "positions": torch.arange(4)}
            if count == 4:
                arguments |= {"logprobs": True, "top_logprobs": 2}
            calls.clear()
            bounds = bounds_of(vocab, 3, random.Random(seed))
            results, _ = on_shards(operations.draw_of, rows, bounds=bounds, **arguments)
            assert_alike(results)
            assert_equal(results[0], sample(rows, backend="reference", **arguments), (seed, count))
            assert "best_kept_of_shard" in calls if filters else "best_of_shard" in calls


@pytest.mark.parametrize("backend", ["cpp", "triton"])
@pytest.mark.parametrize("kind", ["gumbel", "greedy", "reported"])
def test_kernels_follow_the_paths_of_trees_that_penalties_depend_on(kind, backend, monkeypatch):
    """Nodes are made those that are accepted, one after the other."""
    if backend == "triton":
        by_triton(monkeypatch)
    operators, calls = local.operator_for, []
    monkeypatch.setattr(local, "operator_for", lambda *given: calls.append(given[0]) or operators(*given))
    monkeypatch.setattr(target, "read_members", nothing_is_written_down)
    accepted = 0
    for seed in range(many(6) if backend == "cpp" else 1):
        numbers, vocab = torch.Generator().manual_seed(seed), 384 if backend == "cpp" else 192
        logits = torch.randn(2, 7, vocab, generator=numbers)
        parents = torch.tensor([[-1, 0, 1, 2, 0, -1], [-1, -1, 0, 2, -2, 3]])
        arguments: dict[str, Any] = {"processing": Processing(repetition_penalty=1.6, frequency_penalty=0.9)}
        arguments |= {"rule": "gumbel", "seeds": torch.arange(2) + seed, "positions": torch.arange(2)}
        if kind == "greedy":
            arguments["sampling"] = Sampling(temperature=0.0)
        if kind == "reported":
            arguments |= {"logprobs": True, "top_logprobs": 2, "sampling": Sampling(top_k=9)}
        tokens = logits.argmax(-1)[:, :-1].clone()
        for _ in range(3):
            expected = verify_tree(logits, tokens, parents, backend="reference", **arguments)
            for request in range(2):
                children = (parents[request] == expected.path[request].max()).nonzero()[:1, 0]
                tokens[request, children] = expected.next_token[request]
        expected = verify_tree(logits, tokens, parents, backend="reference", **arguments)
        calls.clear()
        results, _ = on_shards(operations.tree_of, [logits], tokens, parents, bounds=[0, 128, vocab], **arguments)
        assert_alike(results)
        assert_equal(results[0], expected, seed)
        assert ("best_kept_of_shard" if kind == "reported" else "best_of_shard") in calls
        accepted += int(expected.num_accepted.sum())
    assert accepted > 0


@pytest.mark.parametrize("backend", ["cpp", "triton"])
def test_the_slices_of_distributions_are_those_of_whole_rows(backend, monkeypatch):
    if backend == "triton":
        by_triton(monkeypatch)
    for seed in range(many(40 if backend == "cpp" else 6)):
        choice, problem = random.Random(seed), random_problem(seed, VOCABS)
        vocab = widest(problem.logits, {})
        bounds = bounds_of(vocab, choice.choice([1, 2, 3, 4]), choice)
        given = {**target_of(problem), "draft_tokens": problem.tokens}
        results, _ = on_shards(operations.scores_of, problem.logits, bounds=bounds, **given)
        expected = target_logprobs(problem.logits, backend="reference", **given)
        for begin, end, result in zip(bounds, bounds[1:], results):
            torch.testing.assert_close(result[..., : end - begin], expected[..., begin:end], **LOGPROBS)
            assert (result[..., end - begin :] == -torch.inf).all()


@pytest.mark.parametrize("bonus", [False, True])
def test_packed_rows_on_shards_get_the_verdict_of_dense_ones(bonus):
    for seed in range(8):
        requests = ragged(seed, bonus)
        arguments = packed_arguments(requests, padding=2)
        logits = [requests.packed_rows(values, 2) for values in requests.problem.logits]
        tokens = requests.packed_drafts(requests.problem.tokens, 2)
        bounds = bounds_of(widest(logits, arguments), 3, random.Random(seed))
        results, _ = on_shards(operations.chain_of, logits, tokens, bounds=bounds, **arguments)
        assert_equal(results[0], requests.problem.verify("reference"), seed)


def ties(kind: str) -> Tensor:
    """Logits [4, 2, 3000] of which the threshold of a filter has many, or all."""
    numbers = torch.Generator().manual_seed(5)
    if kind == "all alike":
        return torch.zeros(4, 2, 3000)
    values = torch.randn(4, 2, 3000, generator=numbers)
    return (values * 2).round() / 2 if kind == "few values" else values * 1e-4


@pytest.mark.parametrize("kind", ["all alike", "few values", "close together"])
@pytest.mark.parametrize("order", ["transformers", "vllm"])
def test_filters_keep_the_tokens_of_whole_rows_where_many_tie_or_lie_close(kind, order):
    top_ks: list[Any] = [None, 3, MOST_CANDIDATES + 500, torch.tensor([0, 5, 2900, -1]), torch.tensor([4, 5, 6, 7])]
    logits = ties(kind)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for index, top_k in enumerate(top_ks):
        for other, (top_p, min_p) in enumerate(((None, 0.2), (0.3, None), (torch.tensor([0.5, 1.0, 0.9, 0.01]), 0.05))):
            for dtype in dtypes if FULL else dtypes[(index + other) % 3 :][:1]:  # each with each of both, in turn
                sampling = Sampling(top_k=top_k, top_p=top_p, min_p=min_p, filter_order=order)
                rows = logits.to(dtype)
                bounds = [0, 1100, 1100, 3000]
                results, _ = on_shards(operations.scores_of, [rows], bounds=bounds, sampling=sampling)
                expected = target_logprobs(rows, sampling=sampling, backend="reference")
                own = torch.cat([part[..., : end - begin] for begin, end, part in zip(bounds, bounds[1:], results)], -1)
                kept = (own > -torch.inf) == (expected > -torch.inf)
                assert kept.all(), (top_k, top_p, min_p, dtype, int((~kept).sum()))
                torch.testing.assert_close(own, expected, **LOGPROBS)


@pytest.mark.parametrize("backend", ["torch", "cpp", "triton"])
def test_tokens_of_mixtures_that_tie_are_kept_on_every_slice(backend, monkeypatch):
    """And the likeliest is the first of those, whatever their slices' own sums are."""
    if backend != "cpp":
        by_triton(monkeypatch)
    if backend == "torch":
        monkeypatch.setattr(local, "operator_for", lambda *_: None)
    filters: list[dict[str, Any]] = [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.01}, {}]
    vocab, ensembles = 3000, [Mixture((0.4, 0.6)), Contrastive(0.5, 0.1)]
    if backend == "triton":
        vocab, ensembles, filters = 100, ensembles[:1], filters[:1]
    first = (ties("few values") / 2).round().bfloat16()[..., :vocab]
    second = (first.float() * 0.5 + (torch.arange(vocab) % 7 == 0)).bfloat16()
    second[..., 0] = 9.0  # so that slices have sums of their own
    bounds, uniforms = [0, vocab // 3, vocab // 2, vocab], torch.full((4,), 0.9, dtype=torch.float64)
    for ensemble in ensembles:
        for own in filters:
            sampling = Sampling(temperature=torch.tensor([0.0, 1.0, 0.7, 1.3]), **own)
            given = {"ensemble": ensemble, "sampling": sampling}
            logits = [first, second]
            results, _ = on_shards(operations.scores_of, logits, bounds=bounds, **given)
            expected = target_logprobs(logits, backend="reference", **given)
            scores = torch.cat([part[..., : end - begin] for begin, end, part in zip(bounds, bounds[1:], results)], -1)
            kept = (scores > -torch.inf) == (expected > -torch.inf)
            assert kept.all(), (ensemble, own, int((~kept).sum()))
            torch.testing.assert_close(scores, expected, **LOGPROBS)
            rows = [values[:, 0] for values in logits]
            results, _ = on_shards(operations.draw_of, rows, bounds=bounds, uniforms=uniforms, **given)
            assert_equal(results[0], sample(rows, backend="reference", uniforms=uniforms, **given), (ensemble, own))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_without_numbers_or_tokens_are_filtered_as_whole_rows(dtype):
    """A rank without a token, and one whose tokens lie far below; NaN on one rank is told to all."""
    logits = torch.randn(6, 900, generator=torch.Generator().manual_seed(1)) * 4
    logits[0, 700] = torch.nan
    logits[1] = -torch.inf
    logits[2, :300] = -torch.inf
    logits[3, 310] = torch.inf
    logits[4, 300:] -= 3000
    uniforms = torch.linspace(0, 0.99, 6, dtype=torch.float64)
    for sampling in (Sampling(top_p=0.9), Sampling(top_p=0.9, min_p=0.01, filter_order="vllm"), Sampling(top_k=1100)):
        given = {"sampling": sampling, "uniforms": uniforms, "logprobs": True}
        results, _ = on_shards(operations.draw_of, [logits.to(dtype)], bounds=[0, 300, 300, 900], **given)
        assert_alike(results)
        assert_equal(results[0], sample(logits.to(dtype), backend="reference", **given), sampling)


def test_as_many_collectives_and_bytes_are_needed_as_the_documentation_says():
    page, readme = (ROOT / "docs" / "distributed.md").read_text(), (ROOT / "README.md").read_text()
    counts = {count.name: count for count in counted.counts()}
    for count in counts.values():
        assert count.collectives <= count.most, count
        assert count.searched <= counted.MOST_BYTES, count
        row = f"| {' | '.join(count.words)} |"
        assert row in page, row
    _, _, performance = (ROOT / "docs" / "performance.md").read_text().partition("## Over tensor-parallel ranks")
    table, _, _ = performance.partition("\n## ")
    copied = [line for line in table.splitlines() if line.startswith(("| rule", "| greedy"))]
    assert copied
    assert all(line in page for line in copied)
    own = [counts[name] for name in README_COLUMNS.values()]
    collectives, sizes = [str(count.collectives) for count in own], [f"{count.size:,.0f}" for count in own]
    for words in (["told of a row", *README_COLUMNS], ["collectives", *collectives], ["bytes", *sizes]):
        assert f"| {' | '.join(words)} |" in readme, words
    searched = (counts[name].searched / 1000 for name in ("rule token, top-p, float32", "rule token, mixture, top-p"))
    assert "{:.1f} kB of float32, {:.1f} kB of a mixture".format(*searched) in page


class Listed:
    """A group of an engine's own: ranks in any order, as a list or one after the other."""

    def __init__(self, told: list[Tensor], kind: str) -> None:
        self.told, self.kind = told, kind

    def all_gather(self, _tensor: Tensor) -> Any:
        if self.kind == "list":
            return self.told
        return torch.cat(self.told) if self.kind == "one after the other" else torch.stack(self.told)


@pytest.mark.parametrize("kind", ["list", "one after the other", "stacked"])
def test_what_ranks_tell_comes_in_the_order_of_their_shards(kind):
    told = {start: torch.full((2, 3), float(start), dtype=torch.float64) for start in (0, 10, 30)}
    for order in ((0, 10, 30), (30, 0, 10)):
        messages = [torch.cat([torch.tensor([float(start)]), told[start].flatten()]) for start in order]
        heard = Exchange(Listed(messages, kind), 10)(told[10])
        assert torch.equal(heard, torch.stack([told[start] for start in (0, 10, 30)]))


def test_processing_and_masks_name_tokens_of_the_whole_vocabulary():
    logits = torch.randn(2, 2, 90)
    ends = torch.tensor([3, 44, 88])
    arguments = {
        "processing": Processing(
            logit_bias=(torch.tensor([[89, 30], [0, 59]]), torch.full((2, 2), 4.0)), end_tokens=ends, min_tokens=5
        ),
        "allowed": torch.full((2, 2, 3), -2, dtype=torch.int32),
        "sampling": Sampling(temperature=0.0),
    }
    for bounds in ([0, 31, 90], [0, 33, 65, 90]):
        results, _ = on_shards(operations.scores_of, [logits], bounds=bounds, **arguments)
        own = torch.cat([part[..., : end - begin] for begin, end, part in zip(bounds, bounds[1:], results)], -1)
        assert torch.equal(own, target_logprobs(logits, backend="reference", **arguments))


def test_token_trees_are_taken_and_their_children_judged_side_by_side():
    tree = TokenTree.branching([3, 2])
    logits, drafts = torch.randn(2, len(tree) + 1, 60), torch.randint(60, (2, len(tree)))
    arguments = {
        "drafter": 0,
        "siblings": "without_replacement",
        "seeds": torch.arange(2),
        "positions": torch.arange(2),
    }
    results, told = on_shards(operations.tree_of, [logits], drafts, tree, bounds=[0, 20, 60], **arguments)
    assert_equal(results[0], verify_tree(logits, drafts, tree, backend="reference", **arguments), tree)
    assert told.collectives == 1 + 3 + 1  # rows, a turn for each of three siblings, the draw
    results, told = on_shards(
        operations.tree_of, [logits], drafts, tree, bounds=[0, 20, 60], seeds=torch.arange(2), positions=torch.arange(2)
    )
    assert told.collectives == 1 + 2


def drafts_beside(target: Tensor, kind: str, numbers: torch.Generator) -> Tensor:
    """Logits of drafts whose probabilities are in many, few or nearly no ratios to the target's."""
    noise = torch.randn(target.shape, generator=numbers)
    kinds = {
        "apart": noise,
        "close": target + noise * 1e-4,
        "of few ratios": target + noise.sign() * 0.3,
        "alike": target,
    }
    return kinds[kind]


@pytest.mark.parametrize("in_torch", [False, True])
@pytest.mark.parametrize("kind", ["apart", "close", "of few ratios", "alike"])
def test_siblings_are_tested_by_the_ratio_of_whole_rows(kind, in_torch, monkeypatch):
    """All of a run of 2 to 4, at uniforms on both sides of where they pass."""
    if in_torch:
        monkeypatch.setattr(local, "operator_for", lambda *_: None)
    numbers, sizes = torch.Generator().manual_seed(3), (2, 3, 4)
    logits = torch.randn(len(sizes), 5, 400, generator=numbers).mul(2)[:, :1].expand(-1, 5, -1).clone()
    outside = drafts_beside(logits, kind, numbers)
    parents = torch.tensor([[-1] * size + [-2] * (4 - size) for size in sizes])
    target, draft = (values[:, 0].double().softmax(-1) for values in (logits, outside))
    ratio = sequential_ratio(target, draft, torch.tensor(sizes))
    tokens = (target / draft).topk(300).indices[:, [90, 120, 180, 240]]  # of ratios below and above
    limits = (target.gather(1, tokens) / (ratio[:, None] * draft.gather(1, tokens))).clamp(max=0.999)
    for node in range(4):
        for side in (-1e-6, 1e-6):
            uniforms = torch.full((len(sizes), 5), 1 - 1e-9, dtype=torch.float64)
            uniforms[:, node] = limits[:, node] + side
            arguments = {"rule": "k_seq", "siblings": "with_replacement", "draft_logits": outside, "uniforms": uniforms}
            given = ([logits], tokens, parents)
            results, _ = on_shards(operations.tree_of, *given, bounds=[0, 90, 90, 400], **arguments)
            assert_alike(results)
            assert_equal(results[0], verify_tree(*given, backend="reference", **arguments), (node, side))


def weighed_at(ratios: Tensor, target: Tensor, draft: Tensor) -> tree_runs.Weighed:
    """What all ranks together tell of rows [rows, vocab], at ratios [rows, 1, ratios]."""
    left = (target[:, None, None] - ratios[..., None] * draft[:, None, None]).clamp(min=0)
    return tree_runs.Weighed(left.sum(-1), torch.where(left > 0, draft[:, None, None], 0.0).sum(-1))


@pytest.mark.parametrize("kind", ["apart", "close", "of few ratios", "alike"])
def test_the_ratio_that_slices_find_emits_the_law_of_the_target(kind):
    numbers = torch.Generator().manual_seed(4)
    logits = torch.randn(15, 3000, generator=numbers).mul(2)
    target, draft = (own.double().softmax(-1) for own in (logits, drafts_beside(logits, kind, numbers)))
    count = torch.tensor([2, 3, 4, 8, 64]).repeat_interleave(3)[:, None]
    least, most, power = torch.ones_like(count).double(), count.double(), torch.full_like(count, tree_runs.POWER)
    for _ in range(2):
        ratios = tree_runs.spaced(least, most, power)
        least, most, _ = tree_runs.narrowed(ratios, weighed_at(ratios, target, draft), count)
        power = torch.ones_like(count)
    alike = torch.minimum(draft, target / least)  # of one draft and its test
    accepted = 1 - (1 - alike.sum(-1, keepdim=True)).clamp(min=0) ** count
    left = (target - least * draft).clamp(min=0)
    left = left / left.sum(-1, keepdim=True).clamp(min=1e-12)
    law = accepted * alike / alike.sum(-1, keepdim=True) + (1 - accepted) * left
    assert (law - target).abs().sum(-1).max() / 2 < 1e-8


def test_siblings_that_one_drafter_drew_take_two_turns_however_many_they_are():
    tree = TokenTree.branching([3, 2])
    logits, drafts = torch.randn(2, len(tree) + 1, 60), torch.randint(60, (2, len(tree)))
    numbers = torch.arange(2)
    arguments = {"rule": "k_seq", "siblings": "with_replacement", "seeds": numbers, "positions": numbers}
    for drafter, turns in ((0, 2), (torch.zeros_like(drafts), 3)):
        given = ([logits], drafts, tree)
        own = arguments | {"drafter": drafter}
        results, told = on_shards(operations.tree_of, *given, bounds=[0, 20, 60], **own)
        assert_equal(results[0], verify_tree(*given, backend="reference", **own), turns)
        assert told.collectives == 1 + turns + 1


WRONG: dict[str, dict[str, Any]] = {
    "vocab_start": {"vocab_start": -1},
    "vocab_size": {"vocab_size": (90, 90)},
    "draft_vocab_size": {"draft_vocab_size": 0},
    "max_top_k": {"max_top_k": 3, "sampling": Sampling(top_k=torch.tensor([5, 1]))},
    "out": {"out": "there"},
    "backend": {"backend": "cpp"},
    "seeds": {"seeds": None},
    "drafter": {"drafter": 7},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named(name):
    arguments = {"vocab_start": 0, "vocab_size": 90, "seeds": torch.arange(2), "positions": torch.arange(2)}
    with pytest.raises(ValueError, match=rf"^{name}: expected"):
        in_lockstep(
            [operations.chain_of(torch.randn(2, 2, 90), torch.zeros(2, 1).long(), **(arguments | WRONG[name]))], [0]
        )


def test_without_a_group_the_argument_is_named_and_unknown_ones_are_refused():
    row = torch.randn(1, 5)
    with pytest.raises(ValueError, match=r"^group: expected"):
        distributed.sample(row, vocab_start=0, vocab_size=5, sampling=Sampling(temperature=0.0))
    with pytest.raises(TypeError, match="vocab_size"):
        distributed.sample(row, vocab_start=0)
    with pytest.raises(TypeError, match="temperature"):
        distributed.sample(row, vocab_start=0, vocab_size=5, temperature=0.0)


def test_a_group_that_gives_something_else_is_refused():
    class Broken:
        def all_gather(self, tensor: Tensor) -> Tensor:
            return tensor[:1]

    with pytest.raises(ValueError, match=r"^group\.all_gather: expected"):
        distributed.sample(
            torch.randn(1, 5), vocab_start=0, vocab_size=5, sampling=Sampling(temperature=0.0), group=Broken()
        )


def test_padding_is_not_read():
    logits, drafts = torch.randn(2, 3, 50), torch.randint(50, (2, 2))
    own = slice_of(logits, 20, 50, True)
    assert own.isnan().any()
    numbers = torch.arange(2)
    results, _ = on_shards(operations.chain_of, [logits], drafts, bounds=[0, 20, 50], seeds=numbers, positions=numbers)
    assert_equal(results[1], verify_chain(logits, drafts, seeds=numbers, positions=numbers, backend="reference"), "")


def nothing_is_written_down(*_: Any) -> Any:
    raise AssertionError("torch reads the rows")


def by_triton(monkeypatch: Any) -> None:
    """Let Triton read slices, interpreted."""
    operators = {name: getattr(torch.ops.specens, own) for name, own in local.BY_TRITON.items()}
    monkeypatch.setattr(local, "operator_for", lambda name, _: operators.get(name))


@pytest.mark.parametrize("backend", ["cpp", "triton"])
@pytest.mark.parametrize("vocab", [90, 700, 5003])
def test_the_best_tokens_of_slices_are_found_by_kernels_as_in_torch(vocab, backend, monkeypatch):
    calls = []
    kernel = target.best_by_kernel
    monkeypatch.setattr(target, "best_by_kernel", lambda *given: calls.append(given) or kernel(*given))
    if backend == "triton":
        by_triton(monkeypatch)
    for seed in range(many(12 if backend == "cpp" else 3)):
        choice, problem = random.Random(seed), random_problem(seed, (vocab,))
        arguments = of_gumbel(problem, seed).arguments | {"logprobs": False}
        if not isinstance(arguments["ensemble"], LogitMixture | Contrastive):
            arguments["ensemble"] = LogitMixture((1.0, -0.3, 0.6)[: len(problem.logits)])
        if len(problem.logits) == 1 and seed % 2:
            arguments["ensemble"] = None
        arguments["sampling"] = Sampling(temperature=(0.0, 0.8, problem.arguments["sampling"].temperature)[seed % 3])
        case = replace(problem, arguments=arguments)
        expected, before = case.verify("reference"), len(calls)
        assert_equal(on_random_shards(case, choice), expected, seed)
        assert len(calls) > before
        with monkeypatch.context() as torch_alone:
            torch_alone.setattr(target, "has_kernel", lambda *_: False)
            assert_equal(on_random_shards(case, choice), expected, seed)


def of_slices(problem: Problem, choice: random.Random) -> Problem:
    """The same unfiltered, under a rule that kernels weigh the slices for."""
    arguments = {name: value for name, value in problem.arguments.items() if name not in ("logprobs", "top_logprobs")}
    rules: list[Any] = ["token", "token", "block", Threshold(0.2), Synthetic(0.6)]
    if choice.random() < 0.4:
        rules = ["typical"]
    if choice.random() < 0.4:
        arguments |= {"logprobs": choice.choice(["raw", "target"]), "top_logprobs": choice.choice([0, 3])}
    if any(arguments.get(name) is not None for name in NEEDS_DRAFT) and choice.random() < 0.2:
        rules = [Replacement(0.6, 0.4)]
    arguments["rule"] = choice.choice(rules)
    temperature: Any = choice.choice([0.7, problem.arguments["sampling"].temperature])
    arguments["sampling"] = Sampling(temperature=temperature)
    if arguments.get("draft_sampling") is not None:
        arguments["draft_sampling"] = Sampling(temperature=choice.choice([0.0, 0.5, temperature]))
    return replace(problem, arguments=arguments)


@pytest.mark.parametrize("backend", ["cpp", "triton"])
@pytest.mark.parametrize("vocab", [1, 90, 5003])
def test_kernels_read_slices_of_chains_as_torch_does(vocab, backend, monkeypatch):
    if backend == "triton":
        by_triton(monkeypatch)
    operators, calls = local.operator_for, []
    monkeypatch.setattr(local, "operator_for", lambda *given: calls.append(given[0]) or operators(*given))
    judge, drawn = Judge(), 0
    for seed in range(many(30 if backend == "cpp" else 2)):
        choice = random.Random(seed)
        case = of_slices(random_problem(seed, (vocab,)), choice)
        if always_greedy(case):
            continue
        before = len(calls)
        result, expected = on_random_shards(case, choice), case.verify("reference")
        assert "chain_of_shard" in calls[before:], case.arguments
        assert case.arguments["rule"] in ("token", "block") or "residual_of_shard" not in calls[before:]
        judge.compare(case, result, expected, seed)
        drawn += int((expected.next_token >= 0).sum())
    assert drawn > 0
    judge.finish(at_least=2)


def filtered(problem: Problem, choice: random.Random) -> Problem:
    """A problem `of_slices` with filters."""
    dtype = choice.choice([torch.bfloat16, torch.float16, torch.float32])
    batch, arguments = len(problem.tokens), dict(problem.arguments)
    top_ps = torch.tensor([choice.choice([0.3, 0.9, 1.0]) for _ in range(batch)])
    filters: list[dict[str, Any]] = [{"top_k": 3, "top_p": 0.8}, {"min_p": 0.1}]
    several = torch.tensor([choice.choice([0, 2, 40]) for _ in range(batch)])
    filters += [{"top_p": top_ps}, {"top_p": 0.7, "min_p": 0.05, "filter_order": choice.choice(["vllm", None])}]
    filters += [{"top_k": several, "top_p": 0.9}, {"top_k": MOST_CANDIDATES + 300, "top_p": 0.95}]
    own = {name: value for name, value in choice.choice(filters).items() if value is not None}
    arguments["sampling"] = replace(arguments["sampling"], **own)
    if arguments.get("draft_sampling") is not None and choice.random() < 0.7:
        arguments["draft_sampling"] = replace(arguments["draft_sampling"], **own)
    if choice.random() < 0.5:
        arguments["processing"] = None  # so that 16-bit logits are searched as such
    if arguments.get("draft_logits") is not None:
        arguments["draft_logits"] = arguments["draft_logits"].to(dtype)
    return replace(problem, logits=[own.to(dtype) for own in problem.logits], arguments=arguments)


@pytest.mark.parametrize(("backend", "vocab"), [("cpp", 90), ("cpp", 5003), ("triton", 90)])
def test_kernels_filter_slices_of_chains_as_torch_does(backend, vocab, monkeypatch):
    if backend == "triton":
        by_triton(monkeypatch)
    operators, calls = local.operator_for, []
    monkeypatch.setattr(local, "operator_for", lambda *given: calls.append(given[0]) or operators(*given))
    judge, weighed, count = Judge(), 0, many(30 if backend == "cpp" else 4)
    for seed in range(count):
        choice = random.Random(seed)
        problem = of_slices(random_problem(seed, (vocab,)), choice)
        case = filtered(problem, choice)
        if always_greedy(case):
            continue
        before = len(calls)
        result, expected = on_random_shards(case, choice), case.verify("reference")
        weighed += "draw_of_shard" in calls[before:]
        judge.compare(case, result, expected, seed)
    assert weighed >= count / 2, weighed
    judge.finish(at_least=count / 2)


@pytest.mark.parametrize(("backend", "vocab"), [("cpp", 90), ("cpp", 5003), ("triton", 90)])
def test_kernels_find_the_best_scores_of_slices_that_are_filtered_or_mixed(backend, vocab, monkeypatch):
    if backend == "triton":
        by_triton(monkeypatch)
    operators, calls = local.operator_for, []
    monkeypatch.setattr(local, "operator_for", lambda *given: calls.append(given[0]) or operators(*given))
    found, count = 0, many(20 if backend == "cpp" else 4)
    for seed in range(count):
        choice = random.Random(seed)
        problem = random_problem(seed, (vocab,))
        case = of_slices(problem, choice)
        case = of_gumbel(case if seed % 3 == 0 else filtered(case, choice), seed)
        if choice.random() < 0.5:
            case = replace(case, arguments=case.arguments | {"top_logprobs": 3 if case.arguments["logprobs"] else 0})
        if always_greedy(case):
            continue
        before = len(calls)
        assert_equal(on_random_shards(case, choice), case.verify("reference"), seed)
        found += not {"best_kept_of_shard", "best_of_shard"}.isdisjoint(calls[before:])
    assert found > (count / 2 if backend == "cpp" else count / 4), found


@pytest.mark.parametrize("rule", ["token", "block"])
def test_triton_reads_slices_in_as_many_launches_as_whole_rows(rule, monkeypatch):
    by_triton(monkeypatch)
    numbers = torch.Generator().manual_seed(2)
    logits, outside = (torch.randn(1, rows, 8192, generator=numbers).bfloat16() for rows in (6, 5))
    uniforms = torch.full((1, 6), 0.4, dtype=torch.float64)
    arguments = {"draft_logits": outside, "uniforms": uniforms, "rule": rule}
    with traffic.counted() as counts:
        results, _ = on_shards(operations.chain_of, [logits], outside.argmax(-1), bounds=[0, 8192], **arguments)
    whole = 2 * (logits.numel() + outside.numel())
    of_block = 1 if rule == "block" else 0  # every draft's row once more, as for whole rows
    assert counts.launches <= traffic.UNFILTERED_LAUNCHES + of_block
    assert counts.logits <= (traffic.UNFILTERED_READS + of_block) * whole
    assert_equal(results[0], verify_chain([logits], outside.argmax(-1), backend="reference", **arguments), rule)


def test_triton_reads_of_filtered_slices_what_is_told_and_the_blocks_that_reach_the_threshold(monkeypatch):
    by_triton(monkeypatch)
    numbers = torch.Generator().manual_seed(2)
    logits, outside = (torch.randn(1, rows, 8192, generator=numbers).bfloat16() for rows in (4, 3))
    for values in (logits, outside):
        values[..., 1024:] -= 8  # so that one block of eight has what is kept
    sampling, uniforms = Sampling(top_k=20, top_p=0.9), torch.full((1, 4), 0.4, dtype=torch.float64)
    arguments = {"draft_logits": outside, "uniforms": uniforms, "sampling": sampling}
    with traffic.counted() as counts:
        results, _ = on_shards(operations.chain_of, [logits], outside.argmax(-1), bounds=[0, 8192], **arguments)
    whole = 2 * (logits.numel() + outside.numel())
    assert counts.launches <= 2 + 2 + 2 + 3  # what is told, the largest and the mass of target and draft, the draw
    assert counts.logits <= (1 + 1 + 0.25) * whole
    assert_equal(results[0], verify_chain([logits], outside.argmax(-1), backend="reference", **arguments), "")


@pytest.mark.parametrize(
    ("ensemble", "launches", "reads"), [(Mixture((0.4, 0.6)), 5, 2), (Contrastive(0.5, 0.1), 8, 3)], ids=str
)
def test_triton_reads_members_again_to_write_a_target_down(ensemble, launches, reads, monkeypatch):
    """Told, written and searched; of what is plausible member 0 alone is read and written besides."""
    by_triton(monkeypatch)
    numbers = torch.Generator().manual_seed(2)
    logits = [torch.randn(1, 3, 2048, generator=numbers).bfloat16() for _ in range(2)]
    arguments = {"rule": "gumbel", "seeds": torch.arange(1), "positions": torch.arange(1), "ensemble": ensemble}
    drafts = logits[0][:, :2].float().argmax(-1)
    with traffic.counted() as counts:
        results, _ = on_shards(operations.chain_of, logits, drafts, bounds=[0, 2048], **arguments)
    assert counts.launches <= launches
    assert counts.logits <= (reads + 0.05) * 2 * sum(own.numel() for own in logits)
    assert_equal(results[0], verify_chain(logits, drafts, backend="reference", **arguments), ensemble)


def always_greedy(problem: Problem) -> bool:
    return problem.arguments["sampling"].greedy


ROWS, PARTS = torch.ones(2, 1).long(), torch.ones(2, 3, 2).double()
OUTSIDE = torch.full((2, 1), 9)
RATIOS = torch.ones(2, 1, 4).double()
TREE_OF_TWO = {"parents": torch.tensor([[-1, -1], [-1, 0]]), "offers": torch.full((2, 2, 2), 0.5).double()}


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("rows", {"rows": -ROWS}),
        ("rows", {"rows": OUTSIDE}),
        ("rows", {"rows": ROWS[:1]}),
        ("rows", {"rows": ROWS.int()}),
        ("rows", {"rows": ROWS * 2, "operator": "mass_of_drafts_of_shard", **TREE_OF_TWO}),
        ("shares", {"shares": PARTS[:, :2, 0]}),
        ("masses", {"masses": PARTS.transpose(1, 2)}),
        ("masses", {"masses": PARTS[..., :1]}),
        ("masses", {"drafter": -1}),
        ("masses", {"drafter": -1, **TREE_OF_TWO}),
        ("masses", {"drafter": -1, "drafters": torch.tensor([[0, 1], [0, 0]])}),
        ("masses", {"draft_sampling": [-1.0, 0.0, 1.0, 0.0, 0.0]}),
        ("masses", {"parents": torch.tensor([[-1, -2], [-1, 0]]), "offers": TREE_OF_TWO["offers"]}),
        ("masses", {"drafter": -1, "of_drafts": True, "operator": "largest_of_shard"}),
        ("state", {"state": torch.zeros(2, 3, 2, 4)}),
        ("state", {"state": torch.zeros(2, 3, 2, 3).double()}),
        ("least", {"least": torch.zeros(2, 3)}),
        ("offers", {**TREE_OF_TWO, "offers": torch.zeros(2, 2).double()}),
        ("parents", {**TREE_OF_TWO, "parents": torch.tensor([[-1, 1], [-1, 0]])}),
        ("parents", {**TREE_OF_TWO, "parents": torch.tensor([[-1, 0], [-3, 0]])}),
        ("parents", {**TREE_OF_TWO, "parents": torch.tensor([[-1, 0, 1], [-1, 0, 1]])}),
        ("nodes", {**TREE_OF_TWO, "operator": "exceeding_of_shard", "nodes": 2 * ROWS, "ratios": RATIOS}),
        ("ratios", {**TREE_OF_TWO, "operator": "exceeding_of_shard", "nodes": ROWS, "ratios": RATIOS[0]}),
        ("draft_slots", {"drafter": -1, "draft_logits": [torch.zeros(2, 2, 300), torch.tensor([0, 5])]}),
    ],
    ids=str,
)
def test_the_operators_of_slices_refuse_what_lies_outside_of_their_rows(name, wrong):
    logits, drafts = [torch.randn(2, 3, 300)], torch.zeros(2, 2).long()
    given = {"rows": ROWS, "shares": ROWS.double(), "masses": PARTS, "state": torch.zeros(2, 3, 2, 3)}
    given |= {"of_drafts": False, "count": 5, "drafter": 0, "operator": "residual_of_shard"} | wrong
    operator = getattr(torch.ops.specens, given.pop("operator"))
    taken = {argument.name for argument in operator.default._schema.arguments}
    given["row_of"] = given.pop("rows")
    with pytest.raises(ValueError, match=rf"^{name}: expected"):
        operator(logits, drafts, **{key: value for key, value in given.items() if key in taken})


def test_the_operators_of_slices_keep_their_contract_by_opcheck():
    seeds, positions = torch.arange(2), torch.arange(6).view(2, 3)
    options = {"seeds": seeds, "positions": positions, "first_token": 256, "draft_tokens": positions[:, :2]}
    logits, drafts = [torch.randn(2, 3, 300)], positions[:, :2].contiguous()
    numbers = torch.ops.specens.chain_of_shard(logits, drafts, drafter=0)
    places = (torch.ones(2, 1).long(), torch.ones(2, 1).double(), torch.ones(2, 3, 2).double(), numbers[-1])
    aims = (torch.ones(2, 1).double(), torch.ones(2).bool(), torch.zeros(2).double())
    searched = (torch.ones(2, 3, 2).double(), numbers[-1], False)
    begun = (numbers[0][..., 0].contiguous(), torch.zeros(2, 3), torch.zeros(2, 3).long(), 8, False, False)
    scale = (torch.ones(2, 3, 2).double(), torch.zeros(2, 3, 2).double())
    weighed = (begun[0], begun[1], False)
    where = (torch.zeros(2, 3).double(), torch.zeros(2, 3).long(), torch.full((2, 3), 2**32))
    parents = torch.tensor([[-1, -1], [-1, 0]])
    calls: list[Any] = [
        (torch.ops.specens.entropies_of_shard.default, (logits, drafts, *places), {"drafter": 0}),
        (torch.ops.specens.logprobs_of_shard.default, (logits, drafts, *places, *scale), {"drafter": 0}),
        (torch.ops.specens.scores_of_shard.default, (logits, drafts, *places, *scale, seeds[:, None]), {"drafter": 0}),
        (torch.ops.specens.top_of_shard.default, (logits, drafts, *places, *scale, 4), {"drafter": 0}),
        (
            torch.ops.specens.best_kept_of_shard.default,
            (logits, drafts, *places, seeds, seeds[:, None].contiguous(), 70, 3),
            {"drafter": 0},
        ),
        (torch.ops.specens.samples_of_shard.default, (logits, drafts, *searched, *weighed, 9, 7), {"drafter": 0}),
        (
            torch.ops.specens.entries_of_shard.default,
            (logits, drafts, *searched, *weighed, *where, 6),
            {"drafter": 0},
        ),
        (torch.ops.specens.buckets_of_shard.default, (logits, drafts, *searched, *begun), {"drafter": 0}),
        (torch.ops.specens.largest_of_shard.default, (logits, drafts, *searched, 5), {"drafter": 0}),
        (torch.ops.specens.best_of_shard.default, (logits,), options),
        (torch.ops.specens.best_of_shard.default, (logits,), options | {"count": 4, "parents": parents}),
        (torch.ops.specens.chain_of_shard.default, (logits, drafts), {"drafter": 0}),
        (torch.ops.specens.residual_of_shard.default, (logits, drafts, *places), {"drafter": 0}),
        (torch.ops.specens.draw_of_shard.default, (logits, drafts, *places, *aims), {"drafter": 0}),
        (torch.ops.specens.chain_of_shard.default, (logits, drafts), {"drafter": 0, "parents": parents}),
        (
            torch.ops.specens.residual_of_shard.default,
            (logits, drafts, *places),
            {"drafter": 0, "parents": parents, "offers": torch.full((2, 2, 2), 0.5).double()},
        ),
        (
            torch.ops.specens.mass_of_drafts_of_shard.default,
            (logits, drafts, *places),
            {"drafter": 0, "parents": parents},
        ),
        (
            torch.ops.specens.exceeding_of_shard.default,
            (logits, drafts, *places, places[0], torch.tensor([[[1.0, 1.5, 2.0]]]).repeat(2, 1, 1).double()),
            {"drafter": 0, "parents": parents, "offers": torch.full((2, 2, 2), -1.0).double()},
        ),
        (torch.ops.specens.gumbel_noise.default, (seeds, positions, torch.arange(30).view(2, 3, 5)), {}),
    ]
    for operator, given, own in calls:
        assert set(torch.library.opcheck(operator, given, own).values()) == {"SUCCESS"}
