"""Compaction of KV caches: backends against a copy made slot by slot, over layouts, faults, threads and tracing."""

from __future__ import annotations

import pytest
import torch
from cases import FULL, TRACED_BACKENDS, many, operator_arguments, with_threads
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_problems import REFUSED, random_problem

import specens_kernels.ops.compact_kv as operation
from specens_kernels import compact_kv, compaction_pays, freed_blocks

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
BACKENDS = ["reference", "cpp", "triton"]
# Triton's interpreter takes a tenth of a second for a problem.
PROBLEMS = {"reference": 150, "cpp": 150, "triton": many(20)}


def check(problem, backend, device="cpu"):
    """Run, and compare all memory, inside and around the caches; return the status."""
    memory, lengths, status = problem.expected()
    moved = problem.copy(device)
    addresses = [cache.data_ptr() for cache in moved.caches]
    result = moved.run(backend)
    assert result.lengths.dtype == torch.int64
    assert result.lengths.tolist() == lengths
    assert result.status.dtype == torch.int32
    assert result.status.tolist() == status
    for after, wanted in zip(moved.memory, memory, strict=True):
        assert torch.equal(after.cpu(), wanted)
    assert addresses == [cache.data_ptr() for cache in moved.caches]
    return status


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("paging", ["dense", "block_table", "slot_mapping"])
def test_kept_slots_move_and_no_other_byte_changes(backend, device, paging):
    for seed in range(PROBLEMS[backend]):
        assert set(check(random_problem(seed, paging=paging), backend, device)) <= {0}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("paging", ["dense", "block_table", "slot_mapping"])
def test_numbers_out_of_range_refuse_their_request_and_touch_nothing(backend, device, paging):
    problems = PROBLEMS[backend] + (10 if backend == "triton" and not FULL else 50)
    seen = [
        status
        for seed in range(problems)
        for status in check(random_problem(seed, faults=0.04, paging=paging), backend, device)
    ]
    assert seen.count(0) > problems // 10
    assert seen.count(REFUSED) > problems // 10


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.02, 0.3]))
def test_any_problem_is_solved_as_by_copying(seed, faults):
    check(random_problem(seed, faults=faults, big=True), "cpp")


@pytest.mark.parametrize("backend", ["cpp"])
def test_threads_change_nothing(backend):
    generator = torch.Generator().manual_seed(0)
    caches = [torch.randn(4, 3, 700, 64, generator=generator) for _ in range(6)]  # 12 MB to move: several threads
    mask = torch.rand(4, 700, generator=generator) < 0.8
    results = []
    for threads in (1, 2):
        moved = [cache.clone() for cache in caches]
        with_threads(threads, lambda moved=moved: compact_kv(moved, mask, backend=backend))
        results.append(moved)
    for one, two, cache in zip(*results, caches, strict=True):
        assert torch.equal(one, two)
        for request in range(4):
            assert torch.equal(one[request, :, : mask[request].sum()], cache[request][:, mask[request]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mask_is_the_list_of_its_places(backend):
    generator = torch.Generator().manual_seed(3)
    for batch, slots in ((3, 17), (0, 4), (2, 0), (1, 1)):
        mask = torch.rand(batch, slots, generator=generator) < 0.6
        cache = torch.randn(batch, 2, slots, 3, generator=generator)
        indices = [row.nonzero()[:, 0].tolist() for row in mask]
        listed = torch.tensor([row + [-1] * (slots - len(row)) for row in indices]).reshape(batch, slots)
        by_mask, by_list = cache.clone(), cache.clone()
        result = compact_kv(by_mask, mask, backend=backend)
        assert torch.equal(result.lengths, mask.sum(1))
        compact_kv([by_list], listed.long(), torch.zeros(batch, dtype=torch.int32), backend=backend)
        assert torch.equal(by_mask, by_list)
        for request, row in enumerate(indices):
            assert torch.equal(by_mask[request, :, : len(row)], cache[request, :, row])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stacked_cache_is_the_list_of_its_views(backend):
    stacked = torch.randn(3, 2, 2, 4, 20, 8)
    views = [part.clone() for layer in stacked for part in layer]
    path, prefix_lens = torch.tensor([[1, 4, -1], [0, 2, 6]]), torch.tensor([7, 12])
    compact_kv(stacked, path, prefix_lens, backend=backend)
    compact_kv(views, path, prefix_lens, backend=backend)
    assert torch.equal(stacked.flatten(0, 1), torch.stack(views))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("stacked", ["separate", "keys first", "blocks first"])
def test_a_paged_cache_with_a_shared_prefix_keeps_it_and_frees_the_blocks_behind(backend, stacked):
    """Requests 0 and 1 share block 5; a path over the edge of a block; the blocks of the rejected nodes come free."""
    table = torch.tensor([[5, 0, 3, 7], [5, 8, 1, 2]], dtype=torch.int32)
    prefix_lens, nodes = torch.tensor([6, 4]), 10  # block_size 4
    path = torch.tensor([[1, 3, 9, -1], [-1, -1, -1, -1]])
    both = torch.randn(*{"keys first": (2, 9), "blocks first": (9, 2), "separate": (2, 9)}[stacked], 4, 3, 8)
    before = both.movedim(1, 0).clone() if stacked == "blocks first" else both.clone()
    caches, dims = (list(both), {}) if stacked == "separate" else (both, {})
    dims = {"batch_dim": -5} if stacked == "blocks first" else dims
    result = compact_kv(caches, path, prefix_lens, block_table=table, **dims, backend=backend)
    after = both.movedim(1, 0) if stacked == "blocks first" else both
    assert result.lengths.tolist() == [9, 4]
    assert result.num_blocks.tolist() == [3, 1]
    logical = [before[:, table[request].long()].flatten(1, 2) for request in range(2)]
    moved = [after[:, table[request].long()].flatten(1, 2) for request in range(2)]
    assert torch.equal(moved[0][:, :9], torch.cat([logical[0][:, :6], logical[0][:, [7, 9, 15]]], 1))
    assert torch.equal(moved[1], logical[1])
    used = -(-(prefix_lens + nodes) // 4)
    assert freed_blocks(table, used, result.num_blocks) == [[7], [8, 1, 2]]


def test_blocks_in_use_are_not_freed():
    table = torch.tensor([[4, 2, 9], [1, 3, -1]])
    assert freed_blocks(table, torch.tensor([3, 2]), torch.tensor([3, 2])) == [[], []]
    assert freed_blocks(table.int(), torch.tensor([3, 2]), torch.tensor([0, 1]).int()) == [[4, 2, 9], [3]]
    with pytest.raises(ValueError, match=r"^num_blocks_before: expected counts from 0 to 3"):
        freed_blocks(table, torch.tensor([4, 2]), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"^num_blocks: expected shape"):
        freed_blocks(table, torch.tensor([3, 2]), torch.tensor([0]))
    with pytest.raises(ValueError, match=r"^block_table: expected a tensor, got list"):
        freed_blocks(table.tolist(), torch.tensor([3, 2]), torch.tensor([0, 1]))


def test_compaction_pays_once_the_holes_have_cost_as_much_as_the_move():
    assert not compaction_pays(0, 0)
    assert not compaction_pays(199, 100)
    assert compaction_pays(200, 100)
    assert compaction_pays(100, 100, move_cost=0.9)
    assert compaction_pays(1, 0)
    with pytest.raises(ValueError, match=r"^moved_slots: expected a number >= 0, got -1"):
        compaction_pays(1, -1)
    with pytest.raises(ValueError, match=r"^holes_read: expected a number >= 0, got 'many'"):
        compaction_pays("many", 1)
    with pytest.raises(ValueError, match=r"^move_cost: expected .*nan"):
        compaction_pays(1, 1, float("nan"))


CACHE, PATH, PREFIX_LENS = torch.randn(2, 3, 12, 4), torch.tensor([[0, 2, -1], [1, 2, 3]]), torch.tensor([4, 7])
PAGED, TABLE = torch.randn(6, 4, 3, 8), torch.tensor([[0, 1, 2], [3, 4, 5]])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("argument", "arguments"),
    [
        ("caches", {"caches": 3}),
        ("caches", {"caches": []}),
        ("caches", {"caches": [None]}),
        ("caches", {"caches": [CACHE, CACHE]}),
        (r"caches\[1\]", {"caches": [CACHE, None]}),
        (r"caches\[1\]", {"caches": [CACHE, CACHE[:1]]}),
        (r"caches\[0\]", {"caches": CACHE[0]}),
        (r"caches\[0\]", {"caches": CACHE[..., ::2]}),
        (r"caches\[0\]", {"caches": CACHE[:, :1].expand(2, 3, 12, 4)}),
        (r"caches\[1\]", {"caches": [PAGED, PAGED[:, 1:]], "block_table": TABLE}),
        ("kept", {"kept": [[0]]}),
        ("kept", {"kept": PATH[0]}),
        ("kept", {"kept": PATH.double()}),
        ("kept", {"kept": PATH.to("meta")}),
        ("prefix_lens", {"prefix_lens": PREFIX_LENS[:1]}),
        ("prefix_lens", {"prefix_lens": PREFIX_LENS.float()}),
        ("num_kept", {"num_kept": 2}),
        ("num_kept", {"num_kept": PREFIX_LENS, "kept": PATH > 0}),
        ("block_table", {"block_table": TABLE[:1], "caches": PAGED}),
        ("block_table", {"block_table": TABLE[0], "caches": PAGED}),
        ("slot_mapping", {"slot_mapping": TABLE.short(), "caches": PAGED}),
        ("slot_mapping", {"slot_mapping": TABLE, "block_table": TABLE, "caches": PAGED}),
        ("batch_dim", {"batch_dim": 0}),
        ("batch_dim", {"batch_dim": -1}),
        ("slot_dim", {"slot_dim": True}),
        ("slot_dim", {"slot_dim": -4}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_argument_is_named_and_nothing_moved(backend, argument, arguments):
    before = CACHE.clone(), PAGED.clone()
    with pytest.raises(ValueError, match=f"^{argument}: expected .*got"):
        compact_kv(**{"caches": CACHE, "kept": PATH, "prefix_lens": PREFIX_LENS, **arguments}, backend=backend)
    assert torch.equal(CACHE, before[0])
    assert torch.equal(PAGED, before[1])


@pytest.mark.parametrize(("backend", "device"), [("reference", "meta"), *(("cpp", device) for device in DEVICES[1:])])
def test_caches_on_two_devices_are_refused(backend, device):
    with pytest.raises(ValueError, match=r"^caches\[1\]: expected device cpu, got"):
        compact_kv([CACHE, CACHE.to(device)], PATH, PREFIX_LENS, backend=backend)


def arguments_of(paged):
    if paged:
        return [PAGED.clone(), PAGED.clone()], PATH, PREFIX_LENS, {"block_table": TABLE}
    return [CACHE.clone(), CACHE.half()], PATH, PREFIX_LENS, {}


@pytest.mark.parametrize("backend", TRACED_BACKENDS)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("paged", [False, True])
def test_the_operator_keeps_its_contract_by_opcheck(backend, device, paged):
    caches, path, prefix_lens, options = arguments_of(paged)
    options = {name: value.to(device) for name, value in options.items()}
    caches = [cache.to(device) for cache in caches]

    def call(name):
        return compact_kv(caches, path.to(device), prefix_lens.to(device), **options, backend=name)

    operator = operation.IMPLEMENTATIONS[backend]
    assert set(torch.library.opcheck(operator, *operator_arguments(operation, call)).values()) == {"SUCCESS"}


@pytest.mark.parametrize("backend", ["cpp"])
@pytest.mark.parametrize(("paged", "masked"), [(False, False), (True, True), *[(False, True), (True, False)] * FULL])
def test_it_compiles_to_one_graph_and_still_moves_in_place(backend, paged, masked):
    def step(caches, kept, prefix_lens, options):
        result = compact_kv(caches, kept, prefix_lens, **options, backend=backend)
        return result.lengths + 1, result.status, caches[0].sum()

    caches, path, prefix_lens, options = arguments_of(paged)
    kept = torch.tensor([[True, False, True], [False, True, True]]) if masked else path
    plain = [cache.clone() for cache in caches]
    addresses = [cache.data_ptr() for cache in caches]
    results = torch.compile(step, fullgraph=True)(caches, kept, prefix_lens, options)
    for result, wanted in zip(results, step(plain, kept, prefix_lens, options), strict=True):
        torch.testing.assert_close(result, wanted)
    for cache, wanted, address in zip(caches, plain, addresses, strict=True):
        assert torch.equal(cache, wanted)
        assert cache.data_ptr() == address
