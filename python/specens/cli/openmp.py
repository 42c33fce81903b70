"""How torch's threads wait for each other on a CPU."""

from __future__ import annotations

import os

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def wait_briefly() -> None:
    """Let threads spin for some microseconds and then sleep, unless the user has chosen; call it before torch loads.

    By default libgomp's threads spin for long, which costs most of the speed as soon as another program runs beside;
    threads that sleep at once lose a third of the speed on idle processors.
    """
    if not any(name in os.environ for name in VARIABLES):
        os.environ["GOMP_SPINCOUNT"] = "10000"


def chosen() -> str:
    """What is set, for people."""
    return ", ".join(f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ) or "the default"
