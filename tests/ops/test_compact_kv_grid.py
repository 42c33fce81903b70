"""The CUDA kernel of compact_kv without a GPU: its body, run thread after thread, must do what the reference does."""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
from pathlib import Path

import pytest
import torch
from kv_problems import random_problem

ROOT = Path(__file__).parents[2]
MAX_OUTER = 4
INT64 = ctypes.c_int64


class IndexTable(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("given", ctypes.c_bool),
        ("wide", ctypes.c_bool),
        *((name, INT64) for name in ("stride_row", "stride_column", "columns")),
    ]


class Moves(ctypes.Structure):
    _fields_ = [
        *((name, IndexTable) for name in ("kept", "prefix_lens", "num_kept", "block_table", "slot_mapping")),
        *((name, INT64) for name in ("batch", "blocks", "block_size")),
        ("lengths", ctypes.c_void_p),
        ("status", ctypes.c_void_p),
    ]


class CacheView(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        *((name, INT64) for name in ("stride_block", "stride_slot", "slot_bytes", "rows")),
        ("outer_sizes", INT64 * MAX_OUTER),
        ("outer_strides", INT64 * MAX_OUTER),
        ("vector_bytes", INT64),
    ]


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """The body as a library, compiled as the package is."""
    library = tmp_path_factory.mktemp("grid") / "grid.so"
    source = Path(__file__).with_name("compact_kv_grid.cpp")
    flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-I{ROOT / 'csrc'}"]
    subprocess.run([os.environ.get("CXX", "c++"), *flags, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def index_table(tensor):
    if tensor is None:
        return IndexTable()
    stride_column, columns = (tensor.stride(1), tensor.shape[1]) if tensor.dim() == 2 else (0, 0)
    return IndexTable(tensor.data_ptr(), True, tensor.dtype == torch.int64, tensor.stride(0), stride_column, columns)


def cache_view(cache, batch_dim, slot_dim):
    """A cache without merged dimensions, in the widest vectors that its addresses allow."""
    size, dims = cache.element_size(), [dim for dim in range(-cache.dim(), -1) if dim not in (batch_dim, slot_dim)]
    sizes = [cache.shape[dim] for dim in dims] + [1] * (MAX_OUTER - len(dims))
    strides = [cache.stride(dim) * size for dim in dims] + [0] * (MAX_OUTER - len(dims))
    block, slot = cache.stride(batch_dim) * size, cache.stride(slot_dim) * size
    numbers = [cache.data_ptr(), block, slot, cache.shape[-1] * size, *strides]
    vector = next(width for width in (16, 8, 4, 2, 1) if not any(number % width for number in numbers))
    rows = torch.Size(sizes).numel() if cache.numel() else 0
    outer = (INT64 * MAX_OUTER)(*sizes), (INT64 * MAX_OUTER)(*strides)
    return CacheView(cache.data_ptr(), block, slot, cache.shape[-1] * size, rows, *outer, vector)


def run(grid, problem, threads, rng):
    """Move all caches; return lengths and status."""
    batch = len(problem.prefix_lens)
    lengths, status = torch.empty(batch, dtype=torch.int64), torch.empty(batch, dtype=torch.int32)
    tables = [problem.kept, problem.prefix_lens, problem.num_kept]
    tables += [problem.paging.get(name) for name in ("block_table", "slot_mapping")]
    smallest = [min(cache.shape[dim] for cache in problem.caches) for dim in (problem.batch_dim, problem.slot_dim)]
    results = lengths.data_ptr(), status.data_ptr()
    moves = Moves(*(index_table(table) for table in tables), batch, *smallest, *results)
    vectors = set()
    for cache in problem.caches:
        view = cache_view(cache, problem.batch_dim, problem.slot_dim)
        order = (INT64 * threads)(*rng.sample(range(threads), threads))
        grid.run_grid(ctypes.byref(moves), ctypes.byref(view), order, INT64(threads))
        vectors.add(view.vector_bytes)
    return lengths, status, vectors


@pytest.mark.parametrize("threads", [1, 3, 32, 128])
@pytest.mark.parametrize("paging", ["dense", "block_table", "slot_mapping"])
def test_threads_in_any_order_move_what_the_reference_moves(grid, threads, paging):
    rng, vectors, refused = random.Random(threads), set(), 0
    for seed in range(120):
        problem = random_problem(seed, faults=rng.choice([0.0, 0.0, 0.02]), paging=paging, big=True)
        memory, lengths, status = problem.expected()
        moved = problem.copy()
        result = run(grid, moved, threads, rng)
        assert result[0].tolist() == lengths
        assert result[1].tolist() == status
        assert all(torch.equal(after, wanted) for after, wanted in zip(moved.memory, memory, strict=True))
        vectors |= result[2]
        refused += sum(code != 0 for code in status)
    assert vectors == {1, 2, 4, 8, 16}
    assert refused > 0
