"""One Ray for all tests of this folder, whose actors know the modules of tests."""

import os
from pathlib import Path

import pytest
import ray

TESTS = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def cluster():
    """Two processors, three GPUs that nobody uses, and two of a resource of its own."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])  # of the actors, too
    ray.init(num_cpus=2, num_gpus=3, resources={"desk": 2}, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
