"""vLLM's own tests of its rejection sampler, from the source release that `make test-vllm` fetches."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path
from xml.etree import ElementTree

import pytest
import vllm

VARIABLE = "VLLM_SOURCE"
FILE = "tests/v1/sample/test_rejection_sampler.py"
# These call a function of vLLM by itself, which the plug-in does not use and which needs Triton or vLLM's C++.
OTHER_FUNCTIONS = "not sample_recovered_tokens"
LEAST = 40  # tests that run


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tests of vLLM's source release."""
    archive = os.environ.get(VARIABLE)
    assert archive, f"{VARIABLE}: expected the source release of vLLM {vllm.__version__} (.tar.gz), got nothing"
    folder = tmp_path_factory.mktemp("vllm")
    wanted = ("tests/__init__.py", "tests/v1/__init__.py", "tests/v1/sample/")
    with tarfile.open(archive) as release:
        members = [member for member in release if member.name.partition("/")[2].startswith(wanted)]
        release.extractall(folder, members=members, filter="data")
    (root,) = folder.iterdir()
    return root


def test_the_tests_of_its_rejection_sampler_pass(source, tmp_path):
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "peer_harness", FILE]
    command += ["-k", OTHER_FUNCTIONS, f"--junitxml={report}"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    run = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout[-4000:]
    counts = ElementTree.parse(report).getroot().find("testsuite").attrib
    assert int(counts["tests"]) >= LEAST
    assert counts["skipped"] == counts["failures"] == counts["errors"] == "0"
