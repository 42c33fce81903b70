"""The mask of draft trees: the reference against a walk up each tree, backends against the reference, layouts, SDPA."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from cases import TRACED_BACKENDS, lay_out, many, operator_arguments

import specens_kernels.ops.tree_mask as operation
from specens_kernels import TokenTree, tree_mask

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
LAYOUTS = ("full", "tree", "packed", "additive")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WINDOWS = (None, 1, 2, 4, 1000)
# Triton's interpreter takes a hundredth of a second for a row.
CASES, BATCHES = {"cpp": 120, "triton": many(8)}, {"cpp": (0, 1, 3, 17), "triton": (0, 1, 3)}
NODES = {"cpp": (0, 1, 7, 8, 9, 33, 64), "triton": (0, 1, 7, 8, 9, 17)}


def random_trees(batch, nodes, seed, faults=0.0):
    """Parents int64 [batch, nodes], a share of which is no parent at all, and prefix lengths [batch] up to 8."""
    generator = torch.Generator().manual_seed(seed)
    parents = (torch.rand(batch, nodes, generator=generator) * (torch.arange(nodes) + 1)).long() - 1
    wrong = torch.randint(-3, nodes + 3, (batch, nodes), generator=generator)
    parents = torch.where(torch.rand(batch, nodes, generator=generator) < faults, wrong, parents)
    return parents, torch.randint(0, 9, (batch,), generator=generator)


def path_to(parents, node, used):
    """The nodes from below the root position to this one; None where a node on the way up has no parent in the tree."""
    path = [node]
    while path[0] < used:
        parent = parents[path[0]]
        if parent == -1:
            return path
        if not -1 < parent < path[0]:
            return None
        path.insert(0, parent)
    return None


def walked(parents, prefix_lens, used, max_prefix, window):
    """The full mask and the positions by walking up from each node."""
    batch, nodes = parents.shape
    mask = torch.zeros(batch, nodes, max_prefix + nodes, dtype=torch.bool)
    positions = torch.zeros(batch, nodes, dtype=torch.int64)
    for request, node in itertools.product(range(batch), range(nodes)):
        prefix_len = int(prefix_lens[request])
        path = path_to(parents[request].tolist(), node, used[request])
        positions[request, node] = prefix_len + (len(path) - 1 if path else 0)
        keys = {max_prefix + node: int(positions[request, node])}  # column: position
        if path:
            keys |= {slot: slot for slot in range(prefix_len)}
            keys |= {max_prefix + ancestor: prefix_len + depth for depth, ancestor in enumerate(path)}
        for column, position in keys.items():
            mask[request, node, column] = window is None or position > positions[request, node] - window
    return mask, positions


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("batch", "nodes", "faults"), [(1, 1, 0.0), (3, 9, 0.0), (4, 14, 0.1), (5, 33, 0.05)])
def test_the_reference_is_what_a_walk_up_the_tree_sees(batch, nodes, faults, window):
    parents, prefix_lens = random_trees(batch, nodes, seed=nodes, faults=faults)
    for num_nodes in (None, torch.tensor([nodes // 2, 0, nodes, nodes + 1, 1][:batch])):
        used = [nodes] * batch if num_nodes is None else num_nodes.tolist()
        result = tree_mask(parents, prefix_lens, max_prefix=9, num_nodes=num_nodes, window=window, backend="reference")
        mask, positions = walked(parents, prefix_lens, used, 9, window)
        assert torch.equal(result.mask, mask)
        assert torch.equal(result.positions, positions)


@pytest.mark.parametrize("backend", ["cpp", "triton"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_backend_gives_the_mask_of_the_reference(backend, device, layout):
    rng = random.Random(layout)
    for seed in range(CASES[backend]):
        batch, nodes = rng.choice(BATCHES[backend]), rng.choice(NODES[backend])
        parents, prefix_lens = random_trees(batch, nodes, seed, faults=rng.choice([0.0, 0.05]))
        num_nodes = torch.tensor([rng.randint(0, nodes + 1) for _ in range(batch)], dtype=torch.int64)
        options = {
            "layout": layout,
            "max_prefix": rng.choice([8, 13]),
            "num_nodes": rng.choice([None, num_nodes.to(device)]),
            "window": rng.choice(WINDOWS),
            "dtype": rng.choice(DTYPES),
        }
        parents = lay_out(parents.to(rng.choice([torch.int64, torch.int32])), rng.choice(["sliced", "steps first"]))
        arguments = parents.to(device), lay_out(prefix_lens, "sliced").to(device)
        result = tree_mask(*arguments, **options, backend=backend)
        expected = tree_mask(*arguments, **options, backend="reference")
        assert result.mask.dtype == expected.mask.dtype
        assert torch.equal(result.mask, expected.mask), options
        assert torch.equal(result.positions, expected.positions), options


@pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
@pytest.mark.parametrize("window", [None, 3])
def test_all_layouts_say_the_same(backend, window):
    parents, prefix_lens = random_trees(5, 21, seed=1, faults=0.05)

    def mask(layout, **options):
        options |= {"window": window, "max_prefix": 8, "backend": backend}
        return tree_mask(parents, prefix_lens, layout=layout, **options).mask

    full = mask("full")
    assert torch.equal(mask("tree"), full[:, :, 8:])
    bits = np.unpackbits(mask("packed").numpy(), axis=2, bitorder="little")
    assert np.array_equal(bits[:, :, :21].astype(bool), mask("tree").numpy())
    assert not bits[:, :, 21:].any()
    for dtype in DTYPES:
        additive = mask("additive", dtype=dtype)
        assert additive.dtype == dtype
        assert torch.equal(additive == 0, full[:, None])
        assert torch.equal(additive == -torch.inf, ~full[:, None])


@pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
def test_a_batch_of_trees_gives_their_bits_and_positions(backend):
    trees = [TokenTree.chains(1, 5), TokenTree.branching([3, 2]).with_root(), TokenTree([]), TokenTree([-1, 0, 0, -1])]
    batch = {name: torch.from_numpy(array) for name, array in TokenTree.batch(trees).items()}
    prefix_lens = torch.tensor([4, 0, 7, 2])
    packed = tree_mask(batch["parents"], prefix_lens, layout="packed", backend=backend)
    for request, tree in enumerate(trees):
        nodes, own = len(tree), tree.ancestor_bits
        assert np.array_equal(packed.mask[request, :nodes, : own.shape[1]].numpy(), own)
        assert not packed.mask[request, :nodes, own.shape[1] :].any()
        assert packed.positions[request, :nodes].tolist() == tree.position_ids(int(prefix_lens[request])).tolist()
        assert packed.positions[request, nodes:].eq(prefix_lens[request]).all()
    counted = tree_mask(batch["parents"].clamp(min=-1), prefix_lens, num_nodes=batch["num_nodes"], layout="packed")
    assert torch.equal(counted.mask, packed.mask)


@pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
@pytest.mark.parametrize("window", [None, 3])
def test_sdpa_with_the_additive_mask_is_attention_along_each_path(backend, window):
    batch, heads, nodes, slots, size = 3, 2, 12, 9, 8
    parents, prefix_lens = random_trees(batch, nodes, seed=5)
    used = torch.tensor([12, 7, 0])
    mask, positions = tree_mask(
        parents, prefix_lens, layout="additive", max_prefix=slots, num_nodes=used, window=window, backend=backend
    )
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(batch, heads, nodes, size, generator=generator)
    key, value = (torch.randn(batch, heads, slots + nodes, size, generator=generator) for _ in range(2))
    together = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    assert torch.isfinite(together).all()
    for request, node in itertools.product(range(batch), range(nodes)):
        path = path_to(parents[request].tolist(), node, int(used[request]))
        if path is None:
            continue
        line = [*range(int(prefix_lens[request])), *(slots + ancestor for ancestor in path)]
        assert positions[request, node] == len(line) - 1
        line = line if window is None else line[-window:]
        alone = torch.nn.functional.scaled_dot_product_attention(
            query[request, :, node : node + 1], key[request][:, line], value[request][:, line]
        )
        torch.testing.assert_close(together[request, :, node : node + 1], alone, atol=2e-6, rtol=2e-5)


PARENTS, PREFIX_LENS = random_trees(3, 5, seed=0)


@pytest.mark.parametrize(
    ("argument", "arguments"),
    [
        ("parents", {"parents": [[-1]]}),
        ("parents", {"parents": PARENTS[0]}),
        ("parents", {"parents": PARENTS.double()}),
        ("parents", {"parents": PARENTS[:, :1].expand(3, 16_385)}),
        ("prefix_lens", {"prefix_lens": PREFIX_LENS[:2]}),
        ("prefix_lens", {"prefix_lens": PREFIX_LENS.short()}),
        ("prefix_lens", {"prefix_lens": PREFIX_LENS - 9}),
        ("prefix_lens", {"prefix_lens": PREFIX_LENS - 9, "layout": "packed"}),
        ("prefix_lens", {"prefix_lens": PREFIX_LENS + 30}),
        ("num_nodes", {"num_nodes": 3}),
        ("num_nodes", {"num_nodes": PREFIX_LENS.float()}),
        ("layout", {"layout": "causal"}),
        ("layout", {"layout": ["full"]}),
        ("max_prefix", {"max_prefix": None}),
        ("max_prefix", {"max_prefix": -1}),
        ("max_prefix", {"max_prefix": True}),
        ("window", {"window": 0}),
        ("window", {"window": 1.5}),
        ("dtype", {"dtype": torch.int32, "layout": "additive"}),
        ("backend", {"backend": "fortran"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_argument_is_named(argument, arguments):
    with pytest.raises(ValueError, match=f"^{argument}: expected .*got"):
        tree_mask(**{"parents": PARENTS, "prefix_lens": PREFIX_LENS, "max_prefix": 30, **arguments})


@pytest.mark.parametrize(
    ("index", "value"), [(0, PARENTS.short()), (1, PREFIX_LENS.short()), (2, PREFIX_LENS[:1]), (3, 4), (4, -1), (5, -1)]
)
def test_the_cpp_operator_itself_refuses_what_it_cannot_read(index, value):
    arguments = [PARENTS, PREFIX_LENS, None, 0, 30, 0, torch.float32]
    arguments[index] = value
    with pytest.raises(ValueError, match=r"^(parents|prefix_lens|num_nodes|layout|max_prefix|window): expected .*got"):
        torch.ops.specens.tree_mask(*arguments)


@pytest.mark.parametrize("backend", TRACED_BACKENDS)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_operator_keeps_its_contract_by_opcheck(backend, device, layout):
    operator = operation.IMPLEMENTATIONS[backend]

    def call(name):
        return tree_mask(PARENTS.to(device), PREFIX_LENS.to(device), layout=layout, max_prefix=9, backend=name)

    results = torch.library.opcheck(operator, *operator_arguments(operation, call))
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("backend", ["cpp"])
@pytest.mark.parametrize("device", DEVICES)
def test_it_compiles_to_one_graph(backend, device):
    def masks(parents, prefix_lens, max_prefix):
        full = tree_mask(parents, prefix_lens, max_prefix=max_prefix, window=3, backend=backend)
        return full.mask, full.positions, tree_mask(parents, prefix_lens, layout="packed", backend=backend).mask

    compiled = torch.compile(masks, fullgraph=True, backend="aot_eager")
    for batch, nodes, max_prefix in ((2, 5, 9), (3, 12, 10), (4, 17, 11)):
        parents, prefix_lens = (tensor.to(device) for tensor in random_trees(batch, nodes, seed=nodes))
        expected = masks(parents, prefix_lens, max_prefix)
        for result, wanted in zip(compiled(parents, prefix_lens, max_prefix), expected, strict=True):
            assert torch.equal(result, wanted)
