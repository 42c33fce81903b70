"""The stand-ins for FlashInfer's and SGLang's functions, against plain Python that says what theirs do."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare
from shim_models import MARGIN, UNTOUCHED, chain_model, distributions, tree_case, tree_model
from specens.adapters.flashinfer import chain_speculative_sampling
from specens.adapters.sglang import tree_speculative_sampling_target_only
from specens.adapters.sglang.links import read_links
from torch import Tensor

from specens_kernels import TokenTree


@pytest.mark.parametrize(("batch", "draft_len", "vocab"), [(40, 4, 33), (25, 1, 2), (30, 7, 1100), (6, 0, 5)])
def test_flashinfer_tokens_and_counters_are_those_of_its_documentation(batch, draft_len, vocab):
    draft = distributions(batch, draft_len, vocab, seed=1)
    target = distributions(batch, draft_len + 1, vocab, seed=2)
    target[:, :draft_len] = (target[:, :draft_len] + 2 * draft) / 3
    drawing = torch.Generator().manual_seed(3)
    tokens = torch.multinomial(draft.view(-1, vocab), 1, generator=drawing).view(batch, draft_len).int()
    random_numbers = torch.rand(batch, draft_len + 1, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    counters = torch.full((batch,), 10, dtype=torch.int32), torch.full((batch,), 20, dtype=torch.int32)
    output, accepted, emitted = chain_speculative_sampling(
        draft, tokens, target, *counters, generator=torch.Generator().manual_seed(4)
    )
    assert accepted is counters[0]
    assert emitted is counters[1]
    assert output.dtype == torch.int32
    near = 0
    for index in range(batch):
        expected = chain_model(draft[index], tokens[index].tolist(), target[index], random_numbers[index].tolist())
        if expected[3] < MARGIN:
            near += 1
            continue
        got = output[index].tolist(), int(accepted[index]) - 10, int(emitted[index]) - 20
        assert got == expected[:3]
    assert near <= max(1, batch // 10)


def test_flashinfer_example_of_its_documentation():
    """Its docstring's numbers: the first draft is surely accepted, the second surely replaced by token 0."""
    draft = torch.tensor([[[0.1, 0.2, 0.3, 0.4], [0.2, 0.3, 0.4, 0.1]]])
    target = torch.tensor([[[0.0, 0.1, 0.6, 0.3], [1.0, 0.0, 0.0, 0.0], [0.7, 0.1, 0.1, 0.1]]])
    output, accepted, emitted = chain_speculative_sampling(draft, torch.tensor([[2, 1]]), target)
    assert output.tolist() == [[2, 0, -1]]
    assert (accepted.tolist(), emitted.tolist()) == ([1], [1])
    assert accepted.dtype == emitted.dtype == torch.int32


def test_flashinfer_text_follows_the_target_with_one_seed_for_the_batch():
    batch, vocab = 20_000, 5
    draft = distributions(1, vocab, seed=5, zeros=0.0).expand(batch, 1, vocab)
    target = distributions(2, vocab, seed=6, zeros=0.0).expand(batch, 2, vocab)
    ids = torch.multinomial(draft[0, 0], batch, replacement=True, generator=torch.Generator().manual_seed(7))
    first = chain_speculative_sampling(draft, ids[:, None], target, seed=11, offset=0)[0]
    counts = torch.bincount(first[:, 0].long(), minlength=vocab)
    assert chisquare(counts, (target[0, 0].double() / target[0, 0].double().sum() * batch)).pvalue > 1e-3
    bonus = first[first[:, 1] >= 0, 1].long()
    expected = target[0, 1].double() / target[0, 1].double().sum() * len(bonus)
    assert chisquare(torch.bincount(bonus, minlength=vocab), expected).pvalue > 1e-3


def test_flashinfer_seeds_decide_and_with_one_a_request_nothing_else_does():
    draft, target = distributions(8, 3, 50, seed=8), distributions(8, 4, 50, seed=9)
    ids = torch.randint(50, (8, 3), generator=torch.Generator().manual_seed(10))
    seeds, offsets = torch.arange(8).view(torch.uint64), torch.full((8,), 5)

    def outputs(indices: list[int], seed, offset) -> Tensor:
        return chain_speculative_sampling(draft[indices], ids[indices], target[indices], seed=seed, offset=offset)[0]

    everyone, some = list(range(8)), [6, 1]
    whole = outputs(everyone, seeds, offsets)
    assert torch.equal(outputs(some, seeds.view(torch.int64)[some], offsets[some]), whole[some])
    assert torch.equal(outputs(everyone, 2**64 - 1, 5), outputs(everyone, torch.tensor([-1]), torch.tensor([5])))
    assert not torch.equal(outputs(everyone, 3, 5), outputs(everyone, 3, 6))
    assert not torch.equal(outputs(everyone, 3, 5), outputs(everyone, 4, 5))


def check_against_the_model(case: dict) -> tuple[int, int]:
    """Compare all that was written; the number of requests near to a tie, which are left out, and of accepted nodes."""
    near = accepted = 0
    written = {}
    batch = len(case["candidates"])
    for request in range(batch):
        predicts, path, count, margin = tree_model(case, request)
        near += margin < MARGIN
        if margin < MARGIN:
            written |= dict.fromkeys(case["retrive_index"][request].tolist())
            continue
        written |= predicts
        accepted += count
        padding = [UNTOUCHED] * (case["accept_index"].shape[1] - len(path))
        assert case["accept_index"][request].tolist() == path + padding
        assert int(case["accept_token_num"][request]) == count
    for index, token in enumerate(case["predicts"].tolist()):
        expected = written.get(index, UNTOUCHED)
        assert expected is None or token == expected
    assert near <= max(1, batch // 10)
    return near, accepted


@pytest.mark.parametrize("thresholds", [(1.0, 1.0), (0.2, 1.0), (1.0, 0.4), (0.1, 0.5), (0.0, 1.0), (1.0, 0.0)])
@pytest.mark.parametrize(
    ("nodes", "num_steps", "vocab"), [(12, 5, 12), (12, 3, 12), (1, 1, 4), (2, 2, 2), (9, 1, 9), (8, 20, 40)]
)
def test_sglang_writes_what_its_kernel_writes(nodes, num_steps, vocab, thresholds):
    case = tree_case(30, nodes, num_steps, vocab, seed=nodes + 100 * num_steps, thresholds=thresholds)
    tree_speculative_sampling_target_only(**case)
    accepted = check_against_the_model(case)[1]
    assert (accepted > 0) == (nodes > 1 and num_steps > 1)


def test_sglang_arguments_in_either_spelling_or_by_place():
    def arguments() -> dict:
        return tree_case(5, 7, 4, 20, seed=3, thresholds=(1.0, 1.0))

    by_position, by_name, respelt = arguments(), arguments(), arguments()
    tree_speculative_sampling_target_only(*by_position.values(), True)
    tree_speculative_sampling_target_only(**by_name, deterministic=False)
    tree_speculative_sampling_target_only(**{name.replace("retrive", "retrieve"): respelt[name] for name in respelt})
    for name in ("predicts", "accept_index", "accept_token_num"):
        assert torch.equal(by_position[name], by_name[name])
        assert torch.equal(by_position[name], respelt[name])
    with pytest.raises(ValueError, match="retrieve_index: expected either"):
        tree_speculative_sampling_target_only(**arguments(), retrieve_index=by_name["retrive_index"])


def one_root(target: list[float], children: list[int], uniform: float, final: float) -> dict:
    """One request: children of node 0 with these tokens; after each a certain last token, that of its own number."""
    nodes = len(children) + 1
    case = tree_case(1, nodes, 3, len(target), seed=1, thresholds=(1.0, 1.0))
    links = [1, *[-1] * len(children)], [-1, *range(2, nodes), -1][:nodes]
    rows = [target, *([float(token == 0) for token in range(len(target))] for _ in children)]
    return case | {
        "candidates": torch.tensor([[0, *children]]),
        "retrive_index": torch.arange(nodes)[None],
        "retrive_next_token": torch.tensor([links[0]]),
        "retrive_next_sibling": torch.tensor([links[1]]),
        "uniform_samples": torch.full((1, nodes), uniform),
        "uniform_samples_for_final_sampling": torch.tensor([final]),
        "target_probs": torch.tensor([rows]),
    }


@pytest.mark.parametrize(
    ("children", "uniform", "final", "path", "last"),
    [
        ([2], 0.0, 0.0, [0], 0),  # a token of probability 0 is not accepted by a uniform of 0
        ([2, 3], 0.0, 0.0, [0, 2], 0),  # but its sibling is
        ([2], 0.5, 1.0, [0], 3),  # a uniform of 1.0 draws the last token of positive probability
        ([1, 1], 0.3, 0.9, [0], 3),  # a token that comes twice is offered once
        ([1, 1, 0], 0.6, 0.9, [0], 3),  # and counts once for its siblings
    ],
)
def test_sglang_boundaries(children, uniform, final, path, last):
    case = one_root([0.25, 0.25, 0.0, 0.5, 0.0], children, uniform, final)
    tree_speculative_sampling_target_only(**case)
    assert case["accept_index"][0, : len(path)].tolist() == path
    assert case["accept_token_num"].tolist() == [len(path) - 1]
    assert case["predicts"][path[-1]] == last


def test_sglang_text_follows_the_target_where_no_threshold_is_set():
    batch, vocab, nodes = 20_000, 6, 4
    case = tree_case(1, nodes, 4, vocab, seed=21, thresholds=(1.0, 1.0))
    case |= {name: case[name].expand(batch, *case[name].shape[1:]) for name in ("candidates", "target_probs")}
    case |= {name: case[name].expand(batch, nodes) for name in ("retrive_next_token", "retrive_next_sibling")}
    generator = torch.Generator().manual_seed(22)
    case["predicts"] = torch.full((batch * nodes,), UNTOUCHED, dtype=torch.int32)
    case["accept_index"] = torch.full((batch, 4), UNTOUCHED, dtype=torch.int32)
    case["accept_token_num"] = torch.zeros(batch, dtype=torch.int32)
    case["retrive_index"] = torch.arange(batch * nodes).view(batch, nodes)
    case["uniform_samples"] = torch.rand(batch, nodes, generator=generator)
    case["uniform_samples_for_final_sampling"] = torch.rand(batch, generator=generator)
    case["draft_probs"] = None
    tree_speculative_sampling_target_only(**case)
    first = case["predicts"].view(batch, nodes)[:, 0].long()
    law = case["target_probs"][0, 0].double()
    possible = law > 0
    counts = torch.bincount(first, minlength=vocab)
    assert counts[~possible].sum() == 0
    assert chisquare(counts[possible], law[possible] / law.sum() * batch).pvalue > 1e-3


def test_links_become_parents_and_an_order_from_the_root_down():
    parents = [-1, 0, 0, 1, 0, 3, 2, 3, 3]
    tree = TokenTree(parents)
    links = torch.from_numpy(tree.first_child)[None], torch.from_numpy(tree.next_sibling)[None]
    assert read_links(*links).parents.tolist() == [parents]
    unlinked = links[0].clone()
    unlinked[0, 3] = -1
    read = read_links(unlinked, links[1])
    assert read.parents.tolist() == [[-1, 0, 0, 1, 0, -1, 2, -1, -1]]
    assert sorted(read.order[0, -3:].tolist()) == [5, 7, 8]


def renumbered(case: dict, seed: int) -> dict:
    """The same trees, their nodes but the root numbered otherwise."""
    batch, nodes = case["candidates"].shape
    generator = torch.Generator().manual_seed(seed)
    shuffles = [torch.randperm(nodes - 1, generator=generator) + 1 for _ in range(batch)]
    order = torch.cat([torch.zeros(batch, 1, dtype=torch.int64), torch.stack(shuffles)], dim=1)
    number, request = order.argsort(dim=1), torch.arange(batch)[:, None]
    changed = {name: case[name][request, order] for name in (*NODE_TABLES, "target_probs")}
    for name in ("retrive_next_token", "retrive_next_sibling"):
        links = case[name][request, order]
        changed[name] = torch.where(links < 0, -1, number.gather(1, links.clamp(min=0)))
    return case | changed


NODE_TABLES = ("candidates", "retrive_index", "uniform_samples")


def test_sglang_nodes_may_be_numbered_in_any_way():
    case = tree_case(40, 10, 5, 12, seed=5, thresholds=(0.2, 0.4))
    outputs = {name: case[name] for name in ("predicts", "accept_index", "accept_token_num")}
    other = renumbered({name: value.clone() if torch.is_tensor(value) else value for name, value in case.items()}, 6)
    tree_speculative_sampling_target_only(**case)
    tree_speculative_sampling_target_only(**other)
    assert outputs["accept_token_num"].sum() > 20
    for name, value in outputs.items():
        assert torch.equal(other[name], value), name


@pytest.mark.parametrize(
    ("first_child", "next_sibling", "message"),
    [
        ([1, -1, 0, -1], [-1, -1, -1, -1], "retrive_next_token: expected -1 or a node from 1 to 3"),
        ([1, -1, -1, -1], [-1, 2, 1, -1], "retrive_next_sibling: expected -1 or a node from 1 to 3, each once"),
        ([1, -1, 3, -1], [-1, -1, -1, 2], "retrive_next_sibling: expected links without a circle"),
    ],
)
def test_sglang_links_that_are_no_tree_are_named(first_child, next_sibling, message):
    case = tree_case(1, 4, 3, 9, seed=2, thresholds=(1.0, 1.0))
    case |= {"retrive_next_token": torch.tensor([first_child]), "retrive_next_sibling": torch.tensor([next_sibling])}
    with pytest.raises(ValueError, match=message):
        tree_speculative_sampling_target_only(**case)


CHAIN = {
    "draft_probs": torch.full((2, 3, 4), 0.25),
    "draft_token_ids": torch.zeros(2, 3, dtype=torch.int32),
    "target_probs": torch.full((2, 4, 4), 0.25),
}


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("draft_probs", torch.full((2, 3), 0.25)),
        ("draft_token_ids", torch.zeros(2, 4, dtype=torch.int32)),
        ("draft_token_ids", torch.zeros(2, 3)),
        ("target_probs", torch.full((2, 3, 4), 0.25)),
        ("maybe_output_accepted_token_num", torch.zeros(3, dtype=torch.int32)),
        ("maybe_output_emitted_draft_token_num", [0, 0]),
        ("deterministic", 1),
        ("seed", torch.zeros(3, dtype=torch.int64)),
        ("seed", torch.zeros(1)),
        ("offset", 2**64),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_flashinfer_bad_argument_is_named(argument, value):
    with pytest.raises(ValueError, match=f"^{argument}: expected .*got"):
        chain_speculative_sampling(**({"seed": 0, "offset": 0} | CHAIN | {argument: value}))


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("predicts", torch.zeros(4, 2, dtype=torch.int32)),
        ("accept_index", torch.zeros(3, 2, dtype=torch.int32)),
        ("accept_index", torch.zeros(2, 0, dtype=torch.int32)),
        ("accept_token_num", torch.zeros(2)),
        ("candidates", torch.zeros(2, 5, dtype=torch.int64)),
        ("retrive_index", None),
        ("retrive_next_token", torch.tensor([[1, 1, -1, -1], [1, -1, -1, -1]])),
        ("retrive_next_sibling", torch.tensor([[-1, 4, -1, -1], [-1, -1, -1, -1]])),
        ("uniform_samples", torch.zeros(2, 4, dtype=torch.int64)),
        ("uniform_samples_for_final_sampling", torch.zeros(2, 1)),
        ("target_probs", torch.zeros(2, 0, 9)),
        ("draft_probs", torch.full((2, 4, 9), 0.1)),
        ("threshold_single", 1.5),
        ("threshold_acc", None),
        ("deterministic", None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_sglang_bad_argument_is_named(argument, value):
    case = tree_case(2, 4, 3, 9, seed=2, thresholds=(1.0, 1.0)) | {argument: value}
    if argument == "target_probs":
        nothing = torch.zeros(2, 0, dtype=torch.int64)
        names = ("candidates", "retrive_index", "retrive_next_token", "retrive_next_sibling")
        case |= dict.fromkeys(names, nothing) | {"uniform_samples": torch.zeros(2, 0)}
    with pytest.raises(ValueError, match=rf"^{argument}: expected .*got"):
        tree_speculative_sampling_target_only(**case)
