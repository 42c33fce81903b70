"""An engine of one's own in the driver: a small recurrent network, its members mixed under every schedule.

A text keeps the state after each of its tokens, so that going back, and the branches of a tree, are list indices.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from specens import SpeculativeEnsemble
from specens.engines.protocol import Context, Engine, Needs, Read, Text
from torch import Tensor, nn

VOCAB, WIDTH = 50, 32


class Network(nn.Module):
    """Logits of the next token from a state, and the state after a token."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding, self.cell, self.output = (
            nn.Embedding(VOCAB, WIDTH),
            nn.GRUCell(WIDTH, WIDTH),
            nn.Linear(WIDTH, VOCAB),
        )

    def forward(self, token: int, state: Tensor) -> Tensor:
        return self.cell(self.embedding(torch.tensor([token])), state)


class NetworkText(Text):
    """states: after the prompt, and after each generated token. nodes: after each node of a tree after them."""

    def __init__(self, prompt: list[int]) -> None:
        self.prompt = prompt
        self.states: list[Tensor] = []
        self.nodes: list[Tensor] = []

    def roll_back(self, length: int) -> None:
        del self.states[length + 1 :]
        self.nodes = []

    def keep_path(self, path: Sequence[int]) -> None:
        self.states += [self.nodes[node] for node in path if node < len(self.nodes)]
        self.nodes = []


class NetworkContext(Context):
    def __init__(self, network: Network) -> None:
        self.network = network

    def add(self, prompt: list[int]) -> NetworkText:
        return NetworkText(prompt)

    def remove(self, text: Text) -> None:
        """The text holds all there is."""

    def holds_tree(self, text: Text, num_tokens: int) -> bool:  # noqa: ARG002
        return True

    def read(self, reads: Sequence[Read]) -> list[Tensor]:
        return [self._read(read, read.text) for read in reads]

    def _read(self, read: Read, text: NetworkText) -> Tensor:
        if not text.states:
            state = torch.zeros(1, WIDTH)
            for token in text.prompt:
                state = self.network(token, state)
            text.states.append(state)
        for token in read.sequence[len(text.states) - 1 :]:
            text.states.append(self.network(token, text.states[-1]))
        for node in range(len(text.nodes), len(read.nodes)):
            parent = read.parents[node]
            before = text.states[-1] if parent < 0 else text.nodes[parent]
            text.nodes.append(self.network(read.nodes[node], before))
        states = [*text.states, *text.nodes][-read.num_rows :]
        return self.network.output(torch.cat(states))


class NetworkEngine(Engine):
    vocab_size = VOCAB

    def __init__(self, seed: int) -> None:
        self.network = Network(seed)

    def open(self, needs: Needs) -> NetworkContext:  # noqa: ARG002
        return NetworkContext(self.network)


if __name__ == "__main__":
    members = [NetworkEngine(seed) for seed in (0, 1)]
    for schedule in ("standard", "fixed", "alternate", "tree"):
        result = SpeculativeEnsemble(members, schedule=schedule, rule="gumbel").generate(
            [1, 2, 3], seed=0, max_new_tokens=12
        )
        print(f"{schedule:10}", *result.tokens)
