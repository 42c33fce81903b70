"""verify_tree: each backend gives the tokens of the reference, and all do what is said of trees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import FULL, TRACED_BACKENDS, many, operator_arguments, tensors_of, with_threads
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from tree_cases import TreeCase, hangs_on_the_last_bits, random_case

import specens_kernels.ops.verify_tree as operation
from specens_kernels import LogitMixture, Mixture, Processing, Sampling, Status, TokenTree, Verdict, verify_tree
from specens_kernels.ops.verify_tree.rules import sequential_ratio

BACKENDS = ("reference", "cpp", "triton")
RANDOM_SEEDS = {"cpp": range(150), "triton": range(many(6))}  # Triton's interpreter takes seconds for a tree
RANDOM_SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    "cpp": {},
    "triton": {"batches": (2,), "vocabs": (2, 7, 33), "sizes": (1, 3, 6)},
}
# with runs of two to five children, from outside and of several members; then of one
K_SEQ_SEEDS = {"cpp": range(90), "triton": [39, 53, *([14, 17, 18, 27, 64, 80, 119, 131, 152, 169] if FULL else [])]}
K_SEQ_SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    "cpp": {},
    "triton": {"batches": (2,), "vocabs": (2, 7, 33), "sizes": (6,)},
}
BRANCHING = TokenTree.branching([2, 2])
SET_ASIDE = 0.01  # the share of requests that may be decided otherwise


def assert_equal(result: Verdict, expected: Verdict) -> None:
    for name, own, other in zip(Verdict._fields, result, expected, strict=True):
        assert (own is None and other is None) or torch.equal(own, other), name


def by_k_seq(case: TreeCase) -> TreeCase:
    drawn = {"siblings": "with_replacement"} if "siblings" in case.arguments else {}
    return replace(case, arguments=case.arguments | {"rule": "k_seq"} | drawn)


def test_random_trees_get_the_tokens_of_the_reference(backend):
    assert_tokens_of_the_reference(
        backend, [random_case(seed, **RANDOM_SIZES[backend]) for seed in RANDOM_SEEDS[backend]]
    )


def test_random_trees_by_k_seq_get_the_tokens_of_the_reference(backend):
    cases = [by_k_seq(random_case(seed, **K_SEQ_SIZES[backend])) for seed in K_SEQ_SEEDS[backend]]
    assert_tokens_of_the_reference(backend, cases)


def assert_tokens_of_the_reference(backend: str, cases: list[TreeCase]) -> None:
    requests = differing = accepted = 0
    for seed, case in enumerate(cases):
        expected, result = case.verify("reference"), case.verify(backend)
        same = (expected.tokens == result.tokens).all(1) & (expected.path == result.path).all(1)
        same &= expected.status == result.status
        for name in ("num_accepted", "num_tokens", "next_token"):
            same &= getattr(expected, name) == getattr(result, name)
        for request in (~same).nonzero()[:, 0].tolist():
            own = result.tokens[request].tolist()
            assert hangs_on_the_last_bits(case, request, own), (seed, request, expected, result)
        torch.testing.assert_close(result.logprobs[same], expected.logprobs[same], atol=5e-5, rtol=1e-5)
        requests, differing = requests + len(same), differing + int((~same).sum())
        accepted += int(expected.num_accepted.sum())
    assert requests >= 2 * len(cases)
    assert accepted > 0.3 * requests
    assert differing <= max(1, SET_ASIDE * requests)


def test_the_most_likely_tokens_are_those_of_the_reference():
    compared = 0
    for seed in range(60):
        case = random_case(seed, batches=(4,))
        expected, result = case.verify("reference", top_logprobs=3), case.verify("cpp", top_logprobs=3)
        same = (expected.tokens == result.tokens).all(1)
        torch.testing.assert_close(result.top_logprobs[same], expected.top_logprobs[same], atol=5e-5, rtol=1e-5)
        compared += int((expected.top_tokens[same] == result.top_tokens[same]).sum())
    assert compared > 1000


def test_a_request_alone_gets_the_bits_that_it_gets_in_a_batch():
    for seed in range(40):
        case = random_case(seed, batches=(7,))
        case = by_k_seq(case) if seed % 4 == 0 else case
        together = case.verify("cpp")
        for indices in ([0], [6, 2], [3, 3]):
            alone = case.requests(indices).verify("cpp")
            assert_equal(alone, Verdict(*(None if value is None else value[indices] for value in together)))


@pytest.mark.parametrize(("batch", "vocab"), [(40, 3000), (1, 300_000)], ids=["many requests", "a long row"])
@pytest.mark.parametrize("rule", ["token", "k_seq", "traversal", "typical"])
def test_the_number_of_threads_does_not_change_a_bit(batch, vocab, rule):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(batch, 7, vocab, generator=generator)
    draft = logits + torch.randn(batch, 7, vocab, generator=generator)
    case = plain_case(logits, draft_tokens_of(draft), rule=rule, draft_logits=draft, siblings="with_replacement")
    single, double = (with_threads(count, lambda: case.verify("cpp", logprobs=True)) for count in (1, 2))
    assert_equal(single, double)


def test_k_seq_needs_children_that_were_drawn_with_replacement():
    logits = torch.randn(1, 7, 9)
    case = plain_case(logits, draft_tokens_of(logits), rule="k_seq", drafter=0, siblings="with_replacement")
    for backend in BACKENDS:
        with pytest.raises(ValueError, match="siblings: expected 'with_replacement' under the rule 'k_seq', got"):
            case.verify(backend, siblings="without_replacement")


def test_eight_children_whose_drafter_is_close_to_the_target_are_accepted_as_often_as_k_seq_says():
    """The ratio is known where nearly all are accepted: sums in float32 do not tell their chance from 1."""
    generator, batch, count = torch.Generator().manual_seed(3), 4000, 8
    target = torch.randn(1, 1, 33, generator=generator).expand(batch, count + 1, -1)
    draft = target + torch.randn(33, generator=generator) * 0.15
    uniforms = torch.rand(batch, count + 1, generator=generator, dtype=torch.float64)
    tokens = torch.multinomial(draft[0, 0].softmax(-1), batch * count, replacement=True, generator=generator)
    given = {"draft_logits": draft, "siblings": "with_replacement", "rule": "k_seq", "uniforms": uniforms}
    case = TreeCase([target], tokens.view(batch, count), torch.full((batch, count), -1), given)
    expected, result = case.verify("reference"), case.verify("cpp")
    probs = [logits[:1, 0].double().softmax(-1) for logits in (target, draft)]
    ratio = sequential_ratio(*probs, torch.tensor([count]))
    overlap = torch.minimum(probs[1], probs[0] / ratio).sum()
    assert ratio < 1.6
    first = (expected.path[:, 0] == 0).double().mean()
    assert abs(first - overlap) < 4 * (overlap * (1 - overlap) / batch) ** 0.5
    assert (expected.tokens != result.tokens).any(1).double().mean() < 0.001


def draft_tokens_of(draft: Tensor) -> Tensor:
    """The most likely token at each node's parent, so that siblings are the same."""
    return draft.argmax(-1)[:, torch.from_numpy(BRANCHING.parents) + 1]


def plain_case(logits: Tensor, tokens: Tensor, **arguments: Any) -> TreeCase:
    batch = len(tokens)
    random_numbers = {"seeds": torch.arange(batch), "positions": torch.arange(batch) * 7}
    return TreeCase([logits], tokens, torch.from_numpy(BRANCHING.parents).expand(batch, -1), random_numbers | arguments)


@pytest.mark.parametrize("backend", ["reference", "cpp"])
def test_trees_are_given_as_parents_or_as_one_or_several_objects(backend):
    trees = [TokenTree([]), TokenTree([-1, -1, 0]), TokenTree([-1, 0, 1, 2]), TokenTree([-1])]
    logits = torch.randn(4, 5, 9, generator=torch.Generator().manual_seed(2))
    parents = torch.full((4, 4), -2)
    for request, tree in enumerate(trees):
        parents[request, : len(tree)] = torch.from_numpy(tree.parents)
    tokens = torch.stack([row.argmax(-1)[(own + 1).clamp(min=0)] for row, own in zip(logits, parents)])
    random_numbers = {"uniforms": torch.full((4, 5), 0.1), "backend": backend}
    expected = verify_tree(logits, tokens, parents, **random_numbers)
    assert_equal(verify_tree(logits, tokens, trees, **random_numbers), expected)
    assert_equal(verify_tree(logits, tokens, parents.int(), max_levels=4, **random_numbers), expected)
    counts = torch.tensor([len(tree) for tree in trees])
    assert_equal(verify_tree(logits, tokens, parents.clamp(min=-1), num_nodes=counts, **random_numbers), expected)
    one = verify_tree(logits, tokens, TokenTree([-1, 0, 0, -1]), **random_numbers)
    assert one.tokens.shape == (4, 3)
    assert one.path.shape == (4, 2)


@pytest.mark.parametrize("rule", ["token", "traversal", "typical"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_greedy_request_follows_its_most_likely_tokens_past_siblings(backend, rule):
    tree = TokenTree([-1, -1, 0, 1, 1, 4])
    logits = torch.zeros(1, 7, 5)
    logits[0, torch.arange(7), torch.tensor([3, 0, 2, 0, 0, 4, 1])] = 5.0
    tokens = torch.tensor([[0, 3, 0, 1, 2, 4]])
    verdict = verify_tree(logits, tokens, tree, sampling=Sampling(0.0), rule=rule, backend=backend)
    assert verdict.tokens.tolist() == [[3, 2, 4, 1]]
    assert verdict.path.tolist() == [[1, 4, 5]]
    assert (verdict.num_accepted.tolist(), verdict.num_tokens.tolist(), verdict.status.tolist()) == ([3], [4], [0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_greedy_request_finds_the_longest_of_several_chains(backend):
    logits = torch.zeros(1, 5, 3)
    logits[..., 1] = 1.0
    tokens = torch.tensor([[1, 1, 0, 1]])
    verdict = verify_tree(logits, tokens, TokenTree.chains(2, 2), sampling=Sampling(0.0), backend=backend)
    assert verdict.path.tolist() == [[1, 3]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_nodes_below_the_last_level_are_padding(backend):
    logits = torch.zeros(1, 5, 3)
    logits[..., 1] = 1.0
    tokens, arguments = torch.ones(1, 4, dtype=torch.int64), {"sampling": Sampling(0.0), "backend": backend}
    for levels in range(6):
        verdict = verify_tree(logits, tokens, TokenTree([-1, 0, 1, 2]), max_levels=levels, **arguments)
        assert verdict.tokens.tolist() == [[1] * (min(levels, 4) + 1) + [-1] * (levels - min(levels, 4))]


@pytest.mark.parametrize("backend", BACKENDS)
def test_processing_counts_the_tokens_on_the_way_to_a_row_only(backend):
    """Frequency penalty: below node 1 token 2 has come once, below node 0 it has not."""
    tree, tokens = TokenTree([-1, -1, 0, 1]), torch.tensor([[1, 2, 2, 2]])
    logits = torch.zeros(1, 5, 4)
    logits[0, :, 2], logits[0, 2, 2] = 1.0, 1.0
    processing = Processing(frequency_penalty=2.0)
    arguments = {"sampling": Sampling(0.0), "processing": processing, "backend": backend}
    assert verify_tree(logits, tokens, tree, **arguments).tokens.tolist() == [[2, 0, -1]]
    logits[0, 0, 1] = 2.0
    assert verify_tree(logits, tokens, tree, **arguments).tokens.tolist() == [[1, 2, 0]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_ends_are_held_back_by_depth_and_not_by_the_number_of_the_row(backend):
    tree, tokens = TokenTree([-1, -1, -1]), torch.tensor([[1, 2, 3]])
    logits = torch.zeros(1, 4, 5)
    logits[0, 0, 3], logits[0, 1:, 4] = 1.0, 1.0
    for least, last in ((0, 4), (1, 4), (2, 0)):
        processing = Processing(min_tokens=least, end_tokens=torch.tensor([4]))
        verdict = verify_tree(logits, tokens, tree, sampling=Sampling(0.0), processing=processing, backend=backend)
        assert verdict.tokens.tolist() == [[3, last]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bit_mask_belongs_to_its_row(backend):
    logits = torch.eye(7).flip(1)[None]
    tokens = draft_tokens_of(logits)
    tokens[0, 1] = 0
    words = torch.full((1, 7, 1), -1, dtype=torch.int32)
    words[0, 1] = 1 << 2
    verdict = verify_tree(logits, tokens, BRANCHING, sampling=Sampling(0.0), allowed=words, backend=backend)
    assert verdict.tokens.tolist() == [[6, 2, -1]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", ["token", "traversal"])
def test_unusual_requests_have_a_status_and_the_others_none(backend, rule):
    batch, nodes = 8, len(BRANCHING)
    logits, draft = torch.zeros(batch, nodes + 1, 5), torch.zeros(batch, nodes + 1, 5)
    logits[:, 0, 1] = 30.0
    tokens = torch.ones(batch, nodes, dtype=torch.int64)
    logits[1, 2] = torch.nan  # after node 1, which comes after a sibling that is accepted
    logits[2, 0, 0] = torch.nan
    logits[3, 1] = -torch.inf
    tokens[4, 0] = 5
    draft[5, 0] = -torch.inf
    uniforms = torch.full((batch, nodes + 1), 0.5, dtype=torch.float64)
    uniforms[6, 3] = 1.0
    counts = torch.full((batch,), nodes)
    counts[7] = nodes + 1
    verdict = verify_tree(
        logits,
        tokens,
        BRANCHING,
        draft_logits=draft,
        siblings="with_replacement",
        rule=rule,
        num_nodes=counts,
        uniforms=uniforms,
        backend=backend,
    )
    assert verdict.status.tolist() == [
        0,
        0,
        Status.NAN_LOGITS,
        Status.NO_TOKEN,
        Status.INVALID_DRAFT_TOKEN,
        Status.INVALID_DRAFT_DISTRIBUTION,
        Status.INVALID_PARAMETER,
        Status.INVALID_PARAMETER,
    ]
    assert verdict.num_tokens[[3, 6, 7]].tolist() == [1, 0, 0]
    assert (verdict.path[6:] == -1).all()
    assert verdict.path[4, 0] == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_children_of_which_nothing_was_left_to_draw_count_as_chosen(backend):
    """Two tokens have draft probability; the third child without replacement cannot have been drawn."""
    draft = torch.full((1, 4, 5), -torch.inf)
    draft[..., :2] = 0.0
    logits = torch.full((1, 4, 5), -torch.inf)
    logits[..., 4] = 0.0
    verdict = verify_tree(
        logits,
        torch.tensor([[0, 1, 4]]),
        TokenTree([-1, -1, -1]),
        draft_logits=draft,
        siblings="without_replacement",
        uniforms=torch.full((1, 4), 0.9),
        backend=backend,
    )
    assert verdict.tokens.tolist() == [[4, 4]]
    assert verdict.status.tolist() == [Status.INVALID_DRAFT_DISTRIBUTION]


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_several_drafters_the_status_tells_the_logits_of_those_that_drafted(backend):
    logits = [torch.zeros(2, 3, 5) for _ in range(2)]
    logits[1][:, 0, 2] = torch.nan  # of a member without weight, the drafter of request 1
    verdict = verify_tree(
        logits,
        torch.tensor([[0, 1], [0, 1]]),
        TokenTree([-1, -1]),
        ensemble=LogitMixture((1.0, 0.0)),
        drafter=torch.tensor([[0, 0], [1, 0]]),
        siblings="with_replacement",
        uniforms=torch.tensor([[0.999, 0.999, 0.5]] * 2),
        draft_sampling=Sampling(0.5),
        backend=backend,
    )
    assert verdict.status.tolist() == [0, Status.NAN_LOGITS]


@pytest.mark.parametrize("backend", ["cpp", "triton"])
def test_a_lone_model_that_drafted_some_nodes_may_have_done_so_with_filters_of_its_own(backend):
    logits = torch.randn(6, 5, 19, generator=torch.Generator().manual_seed(1))
    arguments = {
        "parents": torch.tensor([[-1, -1, 0, 0]]).expand(6, 4),
        "siblings": "with_replacement",
        "drafter": torch.tensor([[0, 0, -1, 0]]).expand(6, 4),
        "sampling": Sampling(temperature=0.8),
        "draft_sampling": Sampling(temperature=0.8, top_k=torch.arange(6)),
        "seeds": torch.arange(6),
        "positions": torch.arange(6),
    }
    tokens = logits[:, [0, 0, 1, 1]].topk(2).indices[..., 0]
    expected = verify_tree(logits, tokens, **arguments, backend="reference")
    verdict = verify_tree(logits, tokens, **arguments, backend=backend)
    assert torch.equal(verdict.tokens, expected.tokens)
    assert torch.equal(verdict.status, expected.status)


def test_strided_inputs_give_the_bits_of_contiguous_ones():
    for seed in range(20):
        case = random_case(seed, batches=(4,))
        strided = replace(
            case,
            member_logits=[logits.transpose(0, 1).contiguous().transpose(0, 1) for logits in case.member_logits],
            draft_tokens=torch.stack([case.draft_tokens, case.draft_tokens], 2)[..., 0].int(),
            parents=torch.stack([case.parents, case.parents], 2)[..., 1],
        )
        assert_equal(strided.verify("cpp"), case.verify("cpp"))


def test_an_empty_batch_gives_empty_results():
    case = random_case(3, batches=(4,)).requests([])
    levels = case.arguments.get("max_levels", case.draft_tokens.shape[1])
    for backend in BACKENDS:
        verdict = case.verify(backend)
        assert verdict.tokens.shape == (0, levels + 1)
        assert verdict.path.shape == (0, levels)


@pytest.mark.parametrize("backend", TRACED_BACKENDS)
def test_the_operator_keeps_its_contract(backend):
    operator = operation.IMPLEMENTATIONS[backend]
    for seed in (1, 5, 8) if backend == "cpp" else (5,):
        arguments = operator_arguments(operation, random_case(seed, batches=(4,)).verify)
        assert set(torch.library.opcheck(operator, *arguments).values()) == {"SUCCESS"}


def test_fake_tensors_get_the_shapes_of_real_ones():
    case = random_case(5, batches=(4,))
    expected = case.verify("cpp")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = replace(case, member_logits=[mode.from_tensor(logits) for logits in case.member_logits])
        result = fake.verify("cpp")
    for own, other in zip(tensors_of(result), tensors_of(expected), strict=True):
        assert (own.shape, own.dtype, own.device) == (other.shape, other.dtype, other.device)


def test_it_compiles_to_one_graph():
    def step(logits: Tensor, draft: Tensor, tokens: Tensor, parents: Tensor, seeds: Tensor) -> tuple[Tensor, ...]:
        random_numbers = {"seeds": seeds, "positions": seeds + 1, "logprobs": True, "backend": "cpp"}
        mixed = verify_tree(
            [logits, draft],
            tokens,
            parents,
            ensemble=Mixture((0.5, 0.5)),
            drafter=1,
            siblings="with_replacement",
            rule="traversal",
            max_levels=2,
            **random_numbers,
        )
        chosen = verify_tree(logits, tokens, parents, **random_numbers)
        return *tensors_of(mixed), *tensors_of(chosen)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for batch in (3, 5):
        logits = torch.randn(batch, 7, 33, generator=torch.Generator().manual_seed(batch))
        tokens = draft_tokens_of(logits)
        parents = torch.from_numpy(BRANCHING.parents).repeat(batch, 1)
        arguments = (logits, logits + 0.1, tokens, parents, torch.arange(batch))
        for own, expected in zip(compiled(*arguments), step(*arguments), strict=True):
            assert torch.equal(own, expected)


def test_only_the_rows_on_the_way_are_copied_nowhere():
    logits = torch.randn(2, 7, 50_000).bfloat16()
    case = plain_case(logits, draft_tokens_of(logits))
    with torch.profiler.profile(profile_memory=True) as profile:
        case.verify("cpp")
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in profile.key_averages())
    assert 0 < allocated < 0.01 * 2 * logits.numel()
