"""libspecens in a workspace that was told the sizes of a call: it allocates nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import c_abi
import pytest

from specens_kernels import instruction_set

TESTS = Path(__file__).parents[1]
OPERATIONS = {name for name, (_, kinds) in c_abi.FUNCTIONS.items() if kinds and kinds[-1].count("specens_workspace")}
OPERATIONS -= {"specens_workspace_create", "specens_workspace_destroy"}


@pytest.fixture(scope="module")
def counter(tmp_path_factory):
    """A library that counts allocations where it is preloaded."""
    library = tmp_path_factory.mktemp("counter") / "count_allocations.so"
    source = Path(__file__).with_name("count_allocations.c")
    subprocess.run(["cc", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", source, "-o", library], check=True)
    return library


@pytest.mark.skipif(sys.platform != "linux", reason="counts in glibc's allocator")
def test_a_call_of_sizes_that_were_reserved_allocates_nothing_on_any_instruction_set(counter):
    environment = {**os.environ, "LD_PRELOAD": str(counter), "PYTHONPATH": f"{TESTS}:{TESTS.parent}"}
    command = [sys.executable, "-m", "counted_calls", str(counter)]
    found = subprocess.run(command, env=environment, cwd=TESTS, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    counts, unreserved = json.loads(found.stdout.splitlines()[-1])
    assert set(counts) == OPERATIONS
    assert set(counts["specens_verify_tree"]["sets"]) == set(instruction_set.available())
    assert all(own["calls"] > 2 for own in counts.values())
    assert not {operation: own["allocations"] for operation, own in counts.items() if own["allocations"]}
    assert unreserved["specens_verify_chain"]["allocations"]  # the counter would see it
