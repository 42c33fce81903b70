"""specens.h and libspecens, for engines without Python: the torch operators' results, token by token."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import c_abi
import pytest
import torch
from cases import FULL, FULL_FACTOR, operator_arguments
from kv_problems import random_problem as cache_problem
from ops.test_collaborative import with_rule
from problems import Problem, random_problem
from torch import Tensor
from tree_cases import random_case, random_parents

import specens_kernels
from specens_kernels import NgramIndex, Threshold, TokenTree, sample, target_logprobs, tree_mask, uniforms
from specens_kernels.arguments import ChainArguments, TreeArguments, target_of
from specens_kernels.ops import sample as sample_operation
from specens_kernels.ops import target_logprobs as score_operation
from specens_kernels.ops import verify_chain as chain_operation
from specens_kernels.ops import verify_tree as tree_operation
from specens_kernels.ops.tree_mask import LAYOUTS

PROBLEMS = 60 * (FULL_FACTOR if FULL else 1)


def chain_problem(seed: int) -> Problem:
    """A random round of chains, under every rule in turn."""
    problem = random_problem(seed, [9, 33, 2100])
    if seed % 4 == 1:
        return with_rule(problem, seed // 4)
    if seed % 4 == 2:
        nobody = dict.fromkeys(("drafter", "draft_logits", "draft_sampling", "uniforms"))
        numbers = {"seeds": torch.arange(len(problem.tokens)) - 1, "positions": torch.arange(len(problem.tokens)) * 7}
        return replace(problem, arguments={**problem.arguments, **nobody, **numbers, "rule": "gumbel"})
    if seed % 4 == 3:
        return replace(problem, arguments={**problem.arguments, "rule": Threshold(0.1)})
    return problem


def chain_arguments(seed: int) -> tuple[ChainArguments, list[Tensor]]:
    """Of a random round of chains, and what the torch operator returns."""
    given, options = operator_arguments(chain_operation, chain_problem(seed).verify)
    return ChainArguments.of(*given, **options), chain_operation.IMPLEMENTATIONS["cpp"](*given, **options)


def assert_same(results: list[Tensor], expected: list[Tensor], name: object) -> None:
    assert len(results) == len(expected)
    for own, other in zip(results, expected, strict=True):
        assert torch.equal(own, other.view(own.shape)), name


def test_chains_are_verified_as_by_the_operator():
    rules = set()
    for seed in range(PROBLEMS):
        arguments, expected = chain_arguments(seed)
        assert_same(c_abi.verify(arguments), expected, seed)
        rules.add(arguments.rule.kind)
    assert rules == set(range(8))


def test_trees_are_verified_as_by_the_operator():
    rules = set()
    for seed in range(PROBLEMS):
        given, options = operator_arguments(tree_operation, random_case(seed).verify)
        arguments = TreeArguments.of(*given, **options)
        assert_same(c_abi.verify(arguments), tree_operation.IMPLEMENTATIONS["cpp"](*given, **options), seed)
        rules.add(arguments.rule.kind)
    assert len(rules) >= 3


def test_a_workspace_and_threads_of_the_caller_change_no_result():
    pool = ThreadPoolExecutor(3)
    ranges = []

    def run(_context: int, end: int, grain: int, ranged: int, of_range: int) -> None:
        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)(ranged)
        parts = [(first, min(first + grain, end)) for first in range(0, end, grain)]
        list(pool.map(lambda part: call(of_range, *part), parts))
        ranges.extend(parts)

    callback = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, *[ctypes.c_void_p] * 2])(run)
    memory = c_abi.Memory()
    threads = memory.struct("threads", num_threads=3, run=ctypes.cast(callback, ctypes.c_void_p).value)
    workspace = c_abi.Workspace(threads)
    for seed in range(30):
        arguments, expected = chain_arguments(seed)
        assert_same(c_abi.verify(arguments, workspace), expected, seed)
    assert len(ranges) > 10


def test_an_argument_that_is_wrong_is_named_and_nothing_is_thrown():
    arguments, _ = chain_arguments(3)
    wrong = arguments._replace(draft=arguments.draft._replace(drafter=99, logits=None, drafters=None))
    with pytest.raises(c_abi.SpecensError, match=r"drafter: expected a member or -1, got 99"):
        c_abi.verify(wrong)
    with pytest.raises(c_abi.SpecensError, match=r"1, 'member_logits: expected at least one, got none"):
        c_abi.call("specens_verify_chain", None, None, None)


def test_a_struct_of_a_later_version_is_refused_and_one_of_an_earlier_gets_defaults():
    memory = c_abi.Memory()
    members = memory.tensors([torch.zeros(1, 2, 5)])
    target = memory.struct("target", member_logits=members, num_members=1)
    out = torch.empty(1, 2, 5)
    target.struct_size = c_abi.STRUCTS["specens_target"].plausibility.offset  # as if nothing came after the weights
    target.plausibility = float("nan")
    c_abi.call("specens_target_logprobs", target, None, out, None, memory=memory)
    torch.testing.assert_close(out.exp(), torch.full((1, 2, 5), 0.2))
    target.struct_size = ctypes.sizeof(target) + 8
    with pytest.raises(c_abi.SpecensError, match=r"target: expected a struct_size of at most \d+, got \d+"):
        c_abi.call("specens_target_logprobs", target, None, out, None, memory=memory)


@pytest.mark.parametrize("language", ["c", "c++"])
def test_the_header_compiles_without_a_warning(language, tmp_path):
    flags = ["-std=c11" if language == "c" else "-std=c++11", "-Wall", "-Wextra", "-pedantic", "-Werror"]
    source = tmp_path / "main.c"
    source.write_text("#include <specens.h>\nint main(void) { return specens_abi_version() != SPECENS_ABI_VERSION; }\n")
    link = [f"-I{specens_kernels.get_include()}", str(Path(specens_kernels.get_library(), "libspecens.a"))]
    program = tmp_path / "main"
    compiler = "cc" if language == "c" else "c++"
    link = ["-x", "none", *link, "-lstdc++", "-lm", "-pthread"]
    command = [compiler, *flags, "-x", language, str(source), f"-I{specens_kernels.get_include()}", *link]
    subprocess.run([*command, "-o", str(program)], check=True)
    subprocess.run([str(program)], check=True)


def test_the_library_needs_neither_torch_nor_python_and_shows_its_own_functions_alone():
    library = Path(specens_kernels.get_library(), "libspecens.so")
    needed = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    assert not [line for line in needed.splitlines() if "(NEEDED)" in line and ("torch" in line or "python" in line)]
    symbols = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    names = {line.split()[-1] for line in symbols.splitlines()}
    declared = set(c_abi.re.findall(r"SPECENS_API [\w*\s]+?\b(specens_\w+)\(", c_abi.SOURCE))
    assert {name for name in names if name.startswith("specens_")} == declared


@pytest.mark.skipif(shutil.which("pkg-config") is None, reason="pkg-config is not installed")
def test_pkg_config_finds_the_library():
    folder = Path(specens_kernels.get_library(), "pkgconfig")
    found = subprocess.run(
        ["pkg-config", "--cflags", "--libs", "specens"],
        env={"PKG_CONFIG_PATH": str(folder), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "-lspecens" in found.stdout


def integers(*sizes: int) -> Tensor:
    return torch.full(sizes, -9)


def call_on(operation: Callable[..., Any], logits: list[Tensor], arguments: dict[str, Any], backend: str) -> Any:
    return operation(logits, **arguments, backend=backend)


def test_draws_are_those_of_the_operator():
    methods = set()
    for seed in range(PROBLEMS):
        problem = random_problem(seed, [9, 33, 2100])
        batch, steps = problem.logits[0].shape[:2]
        if steps == 0:
            continue
        arguments = problem.target() | {"logprobs": seed % 2 == 1, "top_logprobs": seed % 3}
        arguments["allowed"] = None if arguments["allowed"] is None else arguments["allowed"][:, 0]
        if seed % 5 > 2:
            arguments |= {"seeds": torch.arange(batch) - 1, "positions": torch.arange(batch) * 7, "method": "gumbel"}
            arguments["count"] = None if seed % 5 == 3 else 4
        else:
            arguments["uniforms"] = problem.arguments["uniforms"][:, 0]
        logits = [values[:, 0] for values in problem.logits]
        given, options = operator_arguments(sample_operation, partial(call_on, sample, logits, arguments))
        assert_same(c_abi.draw(*given, options), sample_operation.IMPLEMENTATIONS["cpp"](*given, **options), seed)
        methods.add((arguments.get("method"), arguments.get("count")))
    assert len(methods) == 3


def test_distributions_are_those_of_the_operator():
    for seed in range(PROBLEMS // 4):
        problem = random_problem(seed, [9, 33, 2100])
        arguments = problem.target() | {"draft_tokens": problem.tokens}
        given, options = operator_arguments(
            score_operation, partial(call_on, target_logprobs, problem.logits, arguments)
        )
        expected = score_operation.IMPLEMENTATIONS["cpp"](*given, **options)
        memory, logprobs = c_abi.Memory(), torch.empty(expected.shape)
        target, drafts = c_abi.target(memory, target_of(*given, options)), memory.tensor(problem.tokens)
        c_abi.call("specens_target_logprobs", target, drafts, logprobs, None, memory=memory)
        assert torch.equal(logprobs, expected), seed


def test_random_numbers_are_those_of_the_operator():
    generator = torch.Generator().manual_seed(1)
    for batch in (0, 1, 700):
        seeds, positions = (torch.randint(-(2**62), 2**62, (batch,), generator=generator) for _ in range(2))
        memory, steps, numbers = c_abi.Memory(), torch.arange(batch), torch.empty(batch, dtype=torch.float64)
        tensors = [memory.tensor(value) for value in (seeds, positions, steps)]
        c_abi.call("specens_uniforms", *tensors, 2, numbers, None, memory=memory)
        assert torch.equal(numbers, uniforms(seeds, positions, step=steps, stream=2, backend="cpp"))


@pytest.mark.parametrize("layout", ["full", "tree", "packed", "additive"])
def test_masks_are_those_of_the_operator(layout):
    for seed in range(8):
        parents, prefix_lens = random_parents(3, 9, torch.Generator().manual_seed(seed)), torch.tensor([0, 5, 9])
        options = {"num_nodes": torch.tensor([9, 4, 0])} if seed % 2 else {}
        own = {"max_prefix": 11} if layout in ("full", "additive") else {}
        dtype, window = ((torch.float32, None), (torch.bfloat16, 3))[seed % 2]
        expected = tree_mask(parents, prefix_lens, layout=layout, dtype=dtype, window=window, **options, **own)
        mask, positions = torch.empty_like(expected.mask), torch.empty_like(expected.positions)
        memory = c_abi.Memory()
        memory.kept += [mask, positions]
        tensors = {"parents": parents, "prefix_lens": prefix_lens, **options}
        numbers = {"layout": LAYOUTS[layout], "dtype": c_abi.DTYPES[dtype], "window": window or 0, **own}
        indices = {"mask": mask.data_ptr(), "positions": positions.data_ptr()}
        given = memory.struct("mask", **memory.fields(tensors), **numbers, **indices)
        c_abi.call("specens_tree_mask", given, None, memory=memory)
        assert torch.equal(mask, expected.mask), (layout, seed)
        assert torch.equal(positions, expected.positions), (layout, seed)


def test_caches_are_moved_as_slot_by_slot():
    moved = 0
    for seed in range(PROBLEMS):
        problem = cache_problem(seed, faults=0.02 if seed % 3 == 0 else 0.0)
        wanted, lengths, status = problem.expected()
        memory, batch = c_abi.Memory(), len(problem.kept)
        own = torch.empty(batch, dtype=torch.int64), torch.empty(batch, dtype=torch.int32)
        memory.kept += own
        tensors = {name: getattr(problem, name) for name in ("kept", "prefix_lens", "num_kept")} | problem.paging
        given = memory.struct(
            "kv_moves",
            caches=memory.tensors(problem.caches),
            num_caches=len(problem.caches),
            batch_dim=problem.batch_dim,
            slot_dim=problem.slot_dim,
            lengths=own[0].data_ptr(),
            status=own[1].data_ptr(),
            **memory.fields(tensors),
        )
        c_abi.call("specens_compact_kv", given, None, memory=memory)
        assert (own[0].tolist(), own[1].tolist()) == (lengths, status), seed
        assert all(torch.equal(*pair) for pair in zip(problem.memory, wanted, strict=True)), seed
        moved += sum(length > int(prefix) for length, prefix in zip(lengths, problem.prefix_lens))
    assert moved > 10


def test_trees_are_built_as_by_token_tree():
    acceptance = [0.5, 0.2, 0.1]
    expected = TokenTree.best_for_acceptance(acceptance, 12)
    parents, ranks, count, levels = integers(12), integers(12), integers(1), integers(1)
    chances = torch.tensor(acceptance, dtype=torch.float64)
    c_abi.call("specens_best_tree", chances, 3, 12, 0, parents, ranks, count)
    nodes = int(count)
    assert parents[:nodes].tolist() == expected.parents.tolist()
    assert ranks[:nodes].tolist() == expected.child_ranks.tolist()
    memory = c_abi.Memory()
    depth, first, following = integers(12).int(), integers(12), integers(12)
    c_abi.call("specens_tree_links", memory.tensor(parents), depth, first, following, levels, memory=memory)
    assert (depth.tolist(), first.tolist()) == (expected.depth.tolist(), expected.first_child.tolist())
    assert (following.tolist(), int(levels)) == (expected.next_sibling.tolist(), expected.num_levels)
    parents[3] = 7
    with pytest.raises(c_abi.SpecensError, match=r"parents\[3\]: expected -1 or an earlier node, got 7"):
        c_abi.call("specens_tree_links", memory.tensor(parents.int()), depth, first, following, levels, memory=memory)


def test_trees_grow_as_tree_growth_does():
    growth, count = ctypes.c_void_p(), integers(1)
    c_abi.call("specens_growth_create", 9, 3, 4, 1, growth)
    expected = TokenTree.grow(9, 3, max_levels=4)
    generator = torch.Generator().manual_seed(3)
    while len(expected.frontier):
        frontier = c_abi.call("specens_growth_frontier", growth, count)
        assert c_abi.CALLER.integers(frontier, int(count)) == expected.frontier.tolist()
        probabilities = torch.rand(int(count), 4, generator=generator, dtype=torch.float64) / 4
        tokens = torch.randint(99, (int(count), 4), generator=generator, dtype=torch.int32)
        memory = c_abi.Memory()
        c_abi.call("specens_growth_add", growth, memory.tensor(tokens), memory.tensor(probabilities), memory=memory)
        expected.add(tokens.numpy(), probabilities.numpy())
    results = [integers(9) for _ in range(3)]
    c_abi.call("specens_growth_prune", growth, *results, count)
    tree, *others = expected.prune()
    for own, other in zip(results, (tree.parents, *others), strict=True):
        assert own[: int(count)].tolist() == other.tolist()
    c_abi.call("specens_growth_destroy", growth)


def test_an_n_gram_index_drafts_as_the_python_object_does():
    index, count, matched = ctypes.c_void_p(), integers(1), integers(1)
    text = torch.randint(1, 6, (200,), generator=torch.Generator().manual_seed(1))
    c_abi.call("specens_ngram_index_create", 4, index)
    memory = c_abi.Memory()
    for part in (text[:50], text[50:].int()):
        c_abi.call("specens_ngram_index_extend", index, memory.tensor(part), memory=memory)
    expected = NgramIndex(text.numpy(), max_match=4)
    for frequent, choose in ((0, "recent"), (1, "frequent")):
        draft = integers(6)
        c_abi.call("specens_ngram_index_propose", index, 6, 1, frequent, draft, count, matched)
        tokens, match_len = expected.propose(6, choose=choose)
        assert draft[: int(count)].tolist() == tokens.tolist()
        assert int(matched) == match_len
    c_abi.call("specens_ngram_index_begin_text", index)
    c_abi.call("specens_ngram_index_propose", index, 6, 1, 0, draft, count, matched)
    assert int(count) == 0
    with pytest.raises(c_abi.SpecensError, match=r"tokens: expected ids from 0 to 2147483647, got -\d"):
        c_abi.call("specens_ngram_index_extend", index, memory.tensor(text.neg()), memory=memory)
    c_abi.call("specens_ngram_index_destroy", index)
