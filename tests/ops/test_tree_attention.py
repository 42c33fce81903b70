"""Attention of draft trees: the reference against plain attention along each path, backends against the reference."""

from __future__ import annotations

import math

import pytest
import torch
from attention_cases import DTYPES, SLOTS_BEHIND, WINDOWS, assert_near, operands, random_call, random_problem
from cases import operator_arguments
from ops.test_tree_mask import path_to
from torch._subclasses import FakeTensorMode

import specens_kernels.ops.tree_attention as operation
from specens_kernels import TokenTree, tree_attention
from specens_kernels.ops.tree_attention import sdpa

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("num_nodes", [None, [9, 4, 0]])
@pytest.mark.parametrize("padding", [0, 2])
def test_the_reference_is_plain_attention_along_the_path_of_each_node(window, num_nodes, padding):
    problem = random_problem(seed=2, faults=0.05)
    counts = None if num_nodes is None else torch.tensor(num_nodes)
    starts = problem["prefix_lens"].clamp(max=padding) if padding else None
    options = {"num_nodes": counts, "prefix_starts": starts, "window": window}
    result = tree_attention(**problem, **options, backend="reference")
    query, key, value, parents, prefix_lens = problem.values()
    num_paths = 0
    for request, node in torch.cartesian_prod(torch.arange(3), torch.arange(9)).tolist():
        prefix_len, used = int(prefix_lens[request]), 9 if num_nodes is None else num_nodes[request]
        path = path_to(parents[request].tolist(), node, used)
        line = [node + prefix_len]
        if path is not None:
            line = [*range(min(padding, prefix_len), prefix_len), *(prefix_len + ancestor for ancestor in path)]
            line = line if window is None else line[-window:]
            num_paths += 1
        for head in range(4):
            scores = key[request, head // 2, line].double() @ query[request, head, node].double() / math.sqrt(8)
            expected = scores.softmax(0) @ value[request, head // 2, line].double()
            torch.testing.assert_close(result[request, head, node].double(), expected, atol=1e-6, rtol=1e-6)
    assert num_paths >= 10


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("small_mask", [0, sdpa.SMALL_MASK], ids=["two parts", "one mask"])
def test_a_backend_gives_the_result_of_the_reference(monkeypatch, small_mask, dtype, device):
    monkeypatch.setattr(sdpa, "SMALL_MASK", small_mask)
    for seed in range(60):
        problem, options, expected = random_call(seed, dtype)
        on_device = {name: tensor.to(device) for name, tensor in problem.items()}
        on_device |= {name: value.to(device) for name, value in options.items() if isinstance(value, torch.Tensor)}
        result = tree_attention(**options | on_device, backend="sdpa")
        assert_near(result.cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_mask_over_all_slots_as_a_gpu_takes_it_gives_the_result_of_the_reference(dtype):
    for seed in range(60):
        problem, options, expected = random_call(seed, dtype)
        assert_near(sdpa.with_mask(*operands(problem, **options)), expected)


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("small_mask", [0, sdpa.SMALL_MASK], ids=["two parts", "one mask"])
def test_what_lies_in_slots_of_no_token_does_not_matter(monkeypatch, backend, window, small_mask):
    monkeypatch.setattr(sdpa, "SMALL_MASK", small_mask)
    problem = random_problem(1)
    options = {"prefix_starts": problem["prefix_lens"].clamp(max=2), "window": window, "backend": backend}
    expected = tree_attention(**problem, **options)
    slot, lens = torch.arange(problem["key"].shape[2]), problem["prefix_lens"][:, None]
    unused = (slot >= lens + 9) | (slot < lens.clamp(max=2))
    for name in ("key", "value"):
        problem[name] = problem[name].masked_fill(unused[:, None, :, None], torch.nan)
    assert torch.equal(tree_attention(**problem, **options), expected)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("small_mask", [0, sdpa.SMALL_MASK], ids=["two parts", "one mask"])
def test_a_request_is_not_changed_by_those_beside_it(monkeypatch, window, small_mask):
    monkeypatch.setattr(sdpa, "SMALL_MASK", small_mask)
    problem = random_problem(4, batch=6, nodes=12)
    problem["prefix_lens"][1:3] = problem["prefix_lens"][0]  # a run that shares a call
    together = tree_attention(**problem, window=window)
    for request in range(6):
        alone = {name: tensor[request : request + 1] for name, tensor in problem.items()}
        assert torch.equal(tree_attention(**alone, window=window)[0], together[request])


def test_a_chain_is_causal_attention():
    problem = random_problem(3, batch=2, nodes=6)
    problem["prefix_lens"] = torch.tensor([4, 4])
    problem["parents"] = torch.from_numpy(TokenTree.chains(1, 6).parents).expand(2, 6)
    causal = torch.ones(10, 10, dtype=torch.bool).tril()[4:]
    expected = torch.nn.functional.scaled_dot_product_attention(
        problem["query"], problem["key"][:, :, :10], problem["value"][:, :, :10], attn_mask=causal, enable_gqa=True
    )
    assert_near(tree_attention(**problem), expected)


def test_caches_of_any_stride_and_nothing_at_all_are_served():
    problem = random_problem(5)
    expected = tree_attention(**problem)
    strided = {name: tensor.mT.contiguous().mT for name, tensor in problem.items() if tensor.dim() == 4}
    assert strided["key"].stride(3) != 1
    assert_near(tree_attention(**problem | strided | {"parents": problem["parents"].int()}), expected)
    for size in ({"batch": 0}, {"nodes": 0}):
        empty = random_problem(5, **size)
        assert tree_attention(**empty).shape == empty["query"].shape


PROBLEM = random_problem(0)
QUERY, KEY, LENS = PROBLEM["query"], PROBLEM["key"], PROBLEM["prefix_lens"]


@pytest.mark.parametrize(
    ("argument", "arguments"),
    [
        ("query", {"query": [[1.0]]}),
        ("query", {"query": QUERY[0]}),
        ("query", {"query": QUERY.double()}),
        ("query", {"query": QUERY[..., :0]}),
        ("query", {"query": QUERY[:, :, :1].expand(3, 4, 16_385, 8)}),
        ("key", {"key": None}),
        ("key", {"key": KEY[:2]}),
        ("key", {"key": KEY[..., :4]}),
        ("key", {"key": KEY.half()}),
        ("key", {"key": KEY[:, :1].expand(-1, 3, -1, -1)}),
        ("key", {"key": KEY[:, :0]}),
        ("key", {"key": KEY[:, :, :8]}),
        ("value", {"value": KEY[:, :, :-1]}),
        ("value", {"value": KEY.bfloat16()}),
        ("parents", {"parents": PROBLEM["parents"][:, :8]}),
        ("parents", {"parents": PROBLEM["parents"].float()}),
        ("prefix_lens", {"prefix_lens": LENS[:2]}),
        ("prefix_lens", {"prefix_lens": LENS.short()}),
        ("prefix_lens", {"prefix_lens": LENS - 9}),
        ("prefix_lens", {"prefix_lens": LENS + SLOTS_BEHIND + 1}),
        ("num_nodes", {"num_nodes": 3}),
        ("num_nodes", {"num_nodes": LENS.float()}),
        ("prefix_starts", {"prefix_starts": LENS.short()}),
        ("prefix_starts", {"prefix_starts": LENS + 1}),
        ("prefix_starts", {"prefix_starts": LENS - 9}),
        ("window", {"window": 0}),
        ("window", {"window": True}),
        ("scale", {"scale": "1"}),
        ("scale", {"scale": math.nan}),
        ("scale", {"scale": True}),
        ("backend", {"backend": "cpp"}),
        ("backend", {"backend": ["sdpa"]}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_argument_is_named(argument, arguments):
    with pytest.raises(ValueError, match=f"^{argument}: expected .*got"):
        tree_attention(**PROBLEM | arguments)


def test_the_environment_variable_may_name_a_backend_of_this_operation(monkeypatch):
    called = []
    for name, function in operation.IMPLEMENTATIONS.items():
        record = lambda *arguments, name=name, function=function: called.append(name) or function(*arguments)  # noqa: E731
        monkeypatch.setitem(operation.IMPLEMENTATIONS, name, record)
    for chosen, expected in ((None, "sdpa"), ("cpp", "sdpa"), ("reference", "reference"), ("sdpa", "sdpa")):
        monkeypatch.setattr(operation, "CHOSEN_BACKEND", chosen)
        tree_attention(**PROBLEM)
        assert called.pop() == expected
    monkeypatch.setattr(operation, "CHOSEN_BACKEND", "fortran")
    with pytest.raises(ValueError, match=r"^SPECENS_BACKEND: expected .*got 'fortran'"):
        tree_attention(**PROBLEM)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("small_mask", [0, sdpa.SMALL_MASK], ids=["two parts", "one mask"])
def test_the_operator_keeps_its_contract_by_opcheck(monkeypatch, kv_heads, small_mask, device):
    monkeypatch.setattr(sdpa, "SMALL_MASK", small_mask)
    problem = {name: tensor.to(device) for name, tensor in random_problem(0, kv_heads=kv_heads).items()}
    arguments, _ = operator_arguments(operation, lambda name: tree_attention(**problem, backend=name))
    results = torch.library.opcheck(torch.ops.specens.tree_attention_sdpa.default, arguments)
    assert set(results.values()) == {"SUCCESS"}


def test_lengths_that_only_the_operator_reads_are_checked_there():
    arguments, _ = operator_arguments(operation, lambda name: tree_attention(**PROBLEM, backend=name))
    with pytest.raises(ValueError, match=r"^prefix_lens: expected lengths from 0"):
        torch.ops.specens.tree_attention_sdpa(*arguments[:4], LENS - 9, *arguments[5:])


def test_it_runs_on_fake_tensors():
    with FakeTensorMode() as mode:
        problem = {name: mode.from_tensor(tensor) for name, tensor in PROBLEM.items()}
        result = tree_attention(**problem, window=2)
    assert result.shape == QUERY.shape
    assert result.is_contiguous()


@pytest.mark.parametrize("device", DEVICES)
def test_it_compiles_to_one_graph(device):
    compiled = torch.compile(tree_attention, fullgraph=True, backend="aot_eager")
    for seed, nodes in enumerate((5, 12, 17)):
        problem = {name: tensor.to(device) for name, tensor in random_problem(seed, nodes=nodes).items()}
        assert torch.equal(compiled(**problem, window=3), tree_attention(**problem, window=3))
