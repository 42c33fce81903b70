"""vLLM verifies drafts by `verify_chain`: a plug-in, switched on by SPECENS_VLLM=1. README.md says what it replaces.

SPECENS_VLLM_RULE=gumbel makes a seed a text: the same with speculation and without.
"""

from __future__ import annotations

import os

VARIABLE, RULE_VARIABLE = "SPECENS_VLLM", "SPECENS_VLLM_RULE"
ON, OFF = ("1",), ("0",)
RULES = ("token", "gumbel")


def register() -> None:
    """What vLLM calls in each of its processes. Does nothing unless the variable SPECENS_VLLM is 1.

    Raises ValueError for another value of it or of SPECENS_VLLM_RULE (token or gumbel), and RuntimeError for a vLLM
    that is not supported, before anything of it is replaced.
    """
    value, rule = os.environ.get(VARIABLE, ""), os.environ.get(RULE_VARIABLE, "")
    if value in OFF or not (value or rule):
        return
    if value not in ON:
        beside = f" beside {RULE_VARIABLE}={rule}" if rule else ""
        raise ValueError(f"{VARIABLE}: expected 1 (on) or 0 (off){beside}, got {value!r}")
    rule = rule or RULES[0]
    if rule not in RULES:
        raise ValueError(f"{RULE_VARIABLE}: expected {' or '.join(RULES)}, got {rule!r}")
    # Whatever imports vLLM waits for the switch, so that the package costs nothing where it is off.
    from specens.adapters.vllm.install import install

    install(rule)
