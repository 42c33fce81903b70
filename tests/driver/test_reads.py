"""What drafters, schedules and tests ask of an engine: a text goes on from what it holds, whatever trees it takes."""

import functools

import pytest
import torch
from cases import FULL
from driver.strict_engine import HOLDS, VOCAB, StrictEngine
from specens import SpeculativeEnsemble, TreePlan
from specens.drafters import DraftModel, Jacobi, Lookahead, PromptLookup, Several

from bench.end_to_end.overhead import calls
from specens_kernels import Mixture, Sampling

PROMPT = [1, 2, 3, 1, 2]
JOB = {"max_new_tokens": 24, "sampling": Sampling(temperature=0.0)}
DRAFTERS = {
    "a member": lambda _: 1,
    "several": lambda _: Several([PromptLookup(), 1]),
    "others": lambda _: Several([1, PromptLookup(), Jacobi()]),
    "a model": lambda holds: DraftModel(StrictEngine(2, holds)),
    "lookahead": lambda _: Lookahead(3, window=2),
}
PLANS = {
    "that begin as a chain": TreePlan((1, 1, 2, 1)),
    "of a node a level": TreePlan((1, 1, 1, 1)),
    "best first": TreePlan(nodes=6, width=2, levels=5, order="best"),
    "drawn": TreePlan((2, 1, 1), children="sampled"),
    "level by level": TreePlan(nodes=6, width=2, levels=4),
}


def constraint(tokens):
    """Never a token twice in a row."""
    mask = 2**VOCAB - 1
    return torch.tensor([mask & ~(1 << tokens[-1]) if tokens else mask], dtype=torch.int32)


@functools.cache
def standard(weights, constraint):
    members = [StrictEngine(seed, HOLDS["no trees"]) for seed in (0, 1)]
    ensemble = SpeculativeEnsemble(members, ensemble=Mixture(weights), schedule="standard")
    return ensemble.generate(PROMPT, **JOB, constraint=constraint).tokens


@pytest.mark.parametrize("plan", list(PLANS.values())[: None if FULL else 3], ids=list(PLANS)[: None if FULL else 3])
@pytest.mark.parametrize("how", HOLDS)
def test_each_read_goes_on_from_what_the_text_holds(how, plan):
    members = [StrictEngine(seed, HOLDS[how]) for seed in (0, 1)]
    for drafter in list(DRAFTERS.values())[: None if FULL else 3]:
        for weights in [(0.5, 0.5), (1.0, 0.0)] if FULL else [(1.0, 0.0)]:
            own = {"ensemble": Mixture(weights), "drafter": drafter(HOLDS[how]), "tree": plan}
            ensemble = SpeculativeEnsemble(members, **own)
            for rule in (None, constraint):
                assert ensemble.generate(PROMPT, **JOB, constraint=rule).tokens == standard(weights, rule)
            if FULL:
                prompts = [PROMPT, [4], [2, 3]]
                assert len(list(ensemble.generate_many(prompts, batch_size=2, max_new_tokens=16, seed=3))) == 3


@pytest.mark.parametrize(("way", "most"), [("standard", 105), ("fixed", 365), ("alternate", 210), ("tree", 450)])
def test_a_round_of_a_batch_makes_few_calls_of_functions(way, most):
    assert calls(way, 4)[0] < most


def test_accepted_nodes_of_a_chain_are_not_read_again():
    members = [StrictEngine(seed, HOLDS["all trees"]) for seed in (0, 1)]
    how = {"ensemble": Mixture((1.0, 0.0)), "drafter": 1}
    chains, trees = (
        SpeculativeEnsemble(members, **how, **own).generate(PROMPT, **JOB).statistics
        for own in ({"schedule": "fixed", "draft_lens": 3}, {"tree": (1, 1, 1)})
    )
    assert sum(chains.accepted) == sum(trees.accepted) >= 5
    assert trees.tokens_fed[0] == chains.tokens_fed[0]
