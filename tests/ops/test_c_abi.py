"""specens.h and libspecens, for engines without Python: the torch operators' results, token by token."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import c_abi
import pytest
import torch
from cases import FULL, FULL_FACTOR, operator_arguments
from ops.test_collaborative import with_rule
from problems import Problem, random_problem
from torch import Tensor
from tree_cases import random_case

import specens_kernels
from specens_kernels import NgramIndex, Threshold, TokenTree
from specens_kernels.arguments import ChainArguments, TreeArguments
from specens_kernels.ops import verify_chain as chain_room
from specens_kernels.ops import verify_tree as tree_room

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
    given, options = operator_arguments(chain_room, chain_problem(seed).verify)
    return ChainArguments.of(*given, **options), chain_room.IMPLEMENTATIONS["cpp"](*given, **options)


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
        given, options = operator_arguments(tree_room, random_case(seed).verify)
        arguments = TreeArguments.of(*given, **options)
        assert_same(c_abi.verify(arguments), tree_room.IMPLEMENTATIONS["cpp"](*given, **options), seed)
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
    assert c_abi.LIBRARY.specens_verify_chain(None, None, None) == 1
    assert c_abi.LIBRARY.specens_last_error() == b"member_logits: expected at least one, got none"


def test_a_struct_of_a_later_version_is_refused_and_one_of_an_earlier_gets_defaults():
    memory = c_abi.Memory()
    members = memory.tensors([torch.zeros(1, 2, 5)])
    target = memory.struct("target", member_logits=members, num_members=1)
    out = torch.empty(1, 2, 5)
    target.struct_size = c_abi.STRUCTS["specens_target"].plausibility.offset  # as if nothing came after the weights
    target.plausibility = float("nan")
    score = c_abi.LIBRARY.specens_target_logprobs
    c_abi.check(score(ctypes.byref(target), None, ctypes.c_void_p(out.data_ptr()), None))
    torch.testing.assert_close(out.exp(), torch.full((1, 2, 5), 0.2))
    target.struct_size = ctypes.sizeof(target) + 8
    with pytest.raises(c_abi.SpecensError, match=r"target: expected a struct_size of at most \d+, got \d+"):
        c_abi.check(score(ctypes.byref(target), None, ctypes.c_void_p(out.data_ptr()), None))


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


def address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def test_trees_are_built_as_by_token_tree():
    library, count, levels = c_abi.LIBRARY, ctypes.c_int64(), ctypes.c_int64()
    acceptance = [0.5, 0.2, 0.1]
    expected = TokenTree.best_for_acceptance(acceptance, 12)
    parents, ranks, depth = integers(12), integers(12), integers(12).int()
    chances = torch.tensor(acceptance, dtype=torch.float64)
    nodes, any_levels = ctypes.c_int64(12), ctypes.c_int64(0)
    best = (address(chances), ctypes.c_int64(3), nodes, any_levels, address(parents), address(ranks))
    c_abi.check(library.specens_best_tree(*best, ctypes.byref(count)))
    assert parents[: count.value].tolist() == expected.parents.tolist()
    assert ranks[: count.value].tolist() == expected.child_ranks.tolist()
    first, following = integers(12), integers(12)
    links = (address(depth), address(first), address(following), ctypes.byref(levels))
    c_abi.check(library.specens_tree_links(address(parents), count, *links))
    assert (depth.tolist(), first.tolist()) == (expected.depth.tolist(), expected.first_child.tolist())
    assert (following.tolist(), levels.value) == (expected.next_sibling.tolist(), expected.num_levels)
    parents[3] = 7
    with pytest.raises(c_abi.SpecensError, match=r"parents\[3\]: expected -1 or an earlier node, got 7"):
        c_abi.check(library.specens_tree_links(address(parents), count, *links))


def test_trees_grow_as_tree_growth_does():
    library, count, growth = c_abi.LIBRARY, ctypes.c_int64(), ctypes.c_void_p()
    library.specens_growth_frontier.restype = ctypes.POINTER(ctypes.c_int64)
    sizes = (ctypes.c_int64(9), ctypes.c_int64(3), ctypes.c_int64(4), 1)
    c_abi.check(library.specens_growth_create(*sizes, ctypes.byref(growth)))
    expected = TokenTree.grow(9, 3, max_levels=4)
    generator = torch.Generator().manual_seed(3)
    while len(expected.frontier):
        frontier = library.specens_growth_frontier(growth, ctypes.byref(count))
        assert frontier[: count.value] == expected.frontier.tolist()
        probabilities = torch.rand(count.value, 4, generator=generator, dtype=torch.float64) / 4
        tokens = torch.randint(99, (count.value, 4), generator=generator)
        c_abi.check(library.specens_growth_add(growth, address(tokens), address(probabilities), ctypes.c_int64(4)))
        expected.add(tokens.numpy(), probabilities.numpy())
    results = [integers(9) for _ in range(3)]
    c_abi.check(library.specens_growth_prune(growth, *map(address, results), ctypes.byref(count)))
    tree, *others = expected.prune()
    for own, other in zip(results, (tree.parents, *others), strict=True):
        assert own[: count.value].tolist() == other.tolist()
    library.specens_growth_destroy(growth)


def test_an_n_gram_index_drafts_as_the_python_object_does():
    library, index, count, matched = c_abi.LIBRARY, ctypes.c_void_p(), ctypes.c_int64(), ctypes.c_int64()
    text = torch.randint(1, 6, (200,), generator=torch.Generator().manual_seed(1))
    c_abi.check(library.specens_ngram_index_create(ctypes.c_int64(4), ctypes.byref(index)))
    c_abi.check(library.specens_ngram_index_extend(index, address(text), ctypes.c_int64(len(text))))
    expected = NgramIndex(text.numpy(), max_match=4)
    for frequent, choose in ((0, "recent"), (1, "frequent")):
        draft = integers(6)
        wanted = (ctypes.c_int64(6), ctypes.c_int64(1), frequent, address(draft))
        c_abi.check(library.specens_ngram_index_propose(index, *wanted, ctypes.byref(count), ctypes.byref(matched)))
        tokens, match_len = expected.propose(6, choose=choose)
        assert draft[: count.value].tolist() == tokens.tolist()
        assert matched.value == match_len
    with pytest.raises(c_abi.SpecensError, match=r"tokens: expected ids from 0 to 2147483647, got -\d"):
        c_abi.check(library.specens_ngram_index_extend(index, address(text.neg_()), ctypes.c_int64(1)))
    library.specens_ngram_index_destroy(index)
