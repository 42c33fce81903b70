"""An engine that fails where a text is not read on from what it holds. It is light: actors of tests import it."""

import functools

import torch
from specens.engines.protocol import Context, Engine, Text

VOCAB = 9
HOLDS = {
    "all trees": lambda *_: True,
    "no trees": lambda *_: False,
    "two unread nodes": lambda text, num_tokens: num_tokens - text.num_held <= 2,
    "short texts": lambda _, num_tokens: num_tokens <= 14,
}


def by_prompt(text, num_tokens):
    """As the first token of its prompt says."""
    ways = list(HOLDS.values())
    return ways[text.prompt[0] % len(ways)](text, num_tokens)


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
