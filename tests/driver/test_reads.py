"""What drafters, schedules and tests ask of an engine: a text goes on from what it holds, whatever trees it takes."""

import functools

import pytest
import torch
from cases import FULL
from specens import SpeculativeEnsemble, TreePlan
from specens.drafters import DraftModel, Jacobi, Lookahead, PromptLookup, Several
from specens.engines.protocol import Context, Engine, Text

from specens_kernels import Mixture, Sampling

VOCAB = 9
PROMPT = [1, 2, 3, 1, 2]
JOB = {"max_new_tokens": 24, "sampling": Sampling(temperature=0.0)}
HOLDS = {
    "all trees": lambda *_: True,
    "no trees": lambda *_: False,
    "two unread nodes": lambda text, num_tokens: num_tokens - text.num_held <= 2,
    "short texts": lambda _, num_tokens: num_tokens <= 14,
}


class StrictText(Text):
    """Remembers what it read, and fails where it is read on as something else."""

    def __init__(self, prompt):
        self.prompt, self.tokens, self.nodes, self.parents, self.num_held = prompt, [], [], [], 0

    def _holds(self, tokens, nodes=(), parents=()):
        self.tokens, self.nodes, self.parents = list(tokens), list(nodes), list(parents)
        self.num_held = len(self.prompt) + len(self.tokens)  # as llama.cpp counts

    def roll_back(self, length):
        self._holds(self.tokens[:length])

    def keep_nodes(self, nodes):
        kept = [node for node in nodes if node < len(self.nodes)]
        parents = [kept.index(self.parents[node]) if self.parents[node] >= 0 else -1 for node in kept]
        self._holds(self.tokens, [self.nodes[node] for node in kept], parents)

    def keep_path(self, path):
        self._holds(self.tokens + [self.nodes[node] for node in path if node < len(self.nodes)])

    def read(self, read):
        assert read.sequence[: len(self.tokens)] == self.tokens
        assert len(read.sequence) == len(self.tokens) or not self.nodes
        assert list(read.nodes[: len(self.nodes)]) == self.nodes
        assert list(read.parents[: len(self.parents)]) == self.parents
        self._holds(read.sequence, read.nodes, read.parents)


class StrictEngine(Engine):
    vocab_size = VOCAB

    def __init__(self, seed, holds):
        self.seed, self.holds = seed, holds

    def open(self, needs):  # noqa: ARG002
        return StrictContext(self)


class StrictContext(Context):
    def __init__(self, engine):
        self.engine = engine

    def add(self, prompt):
        return StrictText(prompt)

    def remove(self, text):
        text.roll_back(0)

    def holds_tree(self, text, num_tokens):
        return self.engine.holds(text, num_tokens)

    def read(self, reads):
        for read in reads:
            read.text.read(read)
        return [torch.stack([self._row(read, end) for end in range(1 - read.num_rows, 1)]) for read in reads]

    def _row(self, read, end):
        """Logits after the last token of a path, which all of it makes."""
        last, path = len(read.nodes) - 1 + end, []
        settled = [*read.text.prompt, *read.sequence][: len(read.text.prompt) + len(read.sequence) + min(last + 1, 0)]
        while last >= 0:
            path, last = [read.nodes[last], *path], read.parents[last]
        return logits_after(self.engine.seed, tuple(settled + path)[-3:])


@functools.cache
def logits_after(seed, text):
    common, own = (torch.Generator().manual_seed(hash((which, text)) % 2**31) for which in (9, seed))
    return 2 * torch.randn(VOCAB, generator=common) + torch.randn(VOCAB, generator=own)


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


def test_accepted_nodes_of_a_chain_are_not_read_again():
    members = [StrictEngine(seed, HOLDS["all trees"]) for seed in (0, 1)]
    how = {"ensemble": Mixture((1.0, 0.0)), "drafter": 1}
    chains, trees = (
        SpeculativeEnsemble(members, **how, **own).generate(PROMPT, **JOB).statistics
        for own in ({"schedule": "fixed", "draft_lens": 3}, {"tree": (1, 1, 1)})
    )
    assert sum(chains.accepted) == sum(trees.accepted) >= 5
    assert trees.tokens_fed[0] == chains.tokens_fed[0]
