"""What holds for all tests: how libraries are set up before they load, and that a tested backend must exist."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

# Both are read once, when torch and Triton load. libgomp's spinning threads make parallel regions slow on busy cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# The hub is asked for nothing: what a test needs of it lies in a cache that the test has built.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
if os.environ.get("TRITON_INTERPRET") == "1":
    from interpreter import patch_the_interpreter

    patch_the_interpreter()

# Memory that nobody wrote reads as NaN or as the largest integer, so that a kernel that forgets an element shows.
torch.use_deterministic_algorithms(True, warn_only=True)
torch.utils.deterministic.fill_uninitialized_memory = True

if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    worker_count = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    torch.set_num_threads(max(1, torch.get_num_threads() // worker_count))


# The files that take longest, by measurement; pytest-xdist would hand out first those of most tests.
LONGEST = (
    "ops/test_compile_cuda.py",
    "driver/test_smollm2.py",
    "ops/test_verify_chain.py",
    "ops/test_filters_and_rules.py",
    "driver/test_cli_pipes.py",
    "driver/test_batches.py",
    "driver/test_schedules.py",
    "driver/test_planner.py",
    "ops/test_triton_host_side.py",
    "ops/test_gumbel.py",
    "test_gpu_bench.py",
    "ops/test_memory.py",
    "adapters/test_transformers_laws.py",
    "ops/test_processing.py",
    "test_build.py",
    "adapters/test_transformers_smollm2.py",
    "test_pages.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """Let pytest-xdist hand out files in the order below."""
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files, so that no worker is left with one of them when the others are done."""
    tests = Path(__file__).parent
    rank = {tests / name: index for index, name in enumerate(LONGEST)}
    assert all(path.exists() for path in rank), "LONGEST names a file that is gone"
    items.sort(key=lambda item: rank.get(item.path, len(rank)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail, rather than skip, a test of a backend that is not there: an unbuilt extension must not look green."""
    callspec = getattr(item, "callspec", None)
    backend = callspec.params.get("backend") if callspec is not None else None
    if isinstance(backend, str):
        reason = _why_unusable(backend)
        if reason is not None:
            pytest.fail(f"backend {backend!r} is to be tested, but cannot run: {reason}", pytrace=False)


def _why_unusable(backend: str) -> str | None:
    from specens_kernels import backends

    info = backends().get(backend)
    return info.reason if info is not None else None


@pytest.fixture(autouse=True)
def instruction_set_in_turn(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests of operations and laws take the processor's instruction sets in turn; see `in_turn`."""
    if request.path.parent.name not in ("ops", "laws"):
        yield
        return
    from in_turn import begin_test

    from specens_kernels import instruction_set

    before = instruction_set.in_use()
    begin_test(request.node.nodeid)
    yield
    print("instruction set:", instruction_set.in_use())
    if before is not None:
        instruction_set.use(before)


@pytest.fixture(params=["cpp", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend that is tested against the reference."""
    return request.param


@pytest.fixture
def device(backend: str) -> torch.device:
    """Where the inputs of a test of `backend` live: Triton's kernels run on a GPU where there is one."""
    return torch.device("cuda" if backend == "triton" and torch.cuda.is_available() else "cpu")
