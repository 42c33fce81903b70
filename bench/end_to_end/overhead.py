"""What the driver itself costs: rounds over an engine whose forwards take no time.

python -m bench.end_to_end.overhead [--profile fixed]

Milliseconds of processor time of this thread, operations of `specens_kernels` included, a round and request, and the
same at a vocabulary of 64, where these have next to nothing to do; the least of several runs, since other jobs only
add. reading_share: the part of the first that one `torch.amax` over every row that a forward gave takes in the same
run. calls: of functions, those of C too, a round and request, the same on every machine with one release of Python.
forwards: of all members: a round of `fixed` is one of the target and a step of the drafter for each draft, so that a
time is one of so many reads. bare_ms: the least time of a round of `fixed` alone whose calls of engines and operations
stand in a loop, without all else that a driver does.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import time
from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import Any

import torch
from specens import SpeculativeEnsemble
from specens.engines.protocol import Context, Engine, Needs, Read, Text
from torch import Tensor

from specens_kernels import Mixture, sample, verify_chain

VOCAB, NEW_TOKENS, REPEATS = 49152, 96, 5
NUM_ROWS, STARTS = 128, 16  # of a table: seven for each of sixteen texts, from one of so many rows on
WAYS = {
    "standard": {"schedule": "standard"},
    "fixed": {"schedule": "fixed", "draft_lens": 4},
    "alternate": {"schedule": "alternate", "draft_lens": 1},
    "tree": {"tree": (2, 2)},
}


class NoText(Text):
    """Nothing is kept of it."""

    def roll_back(self, length: int) -> None:
        """Nothing."""


class NoContext(Context):
    """Gives rows of a table, whatever is read: as they lie after a real forward of a batch, apart from the last one's.

    tables: two that are equal, in memory of their own.
    """

    num_rows = 0  # that all contexts gave

    def __init__(self, tables: Iterable[Tensor]) -> None:
        self._tables = cycle(tables)

    def add(self, prompt: list[int]) -> NoText:  # noqa: ARG002
        """A text."""
        return NoText()

    def read(self, reads: Sequence[Read]) -> list[Tensor]:
        """As many rows for each text, one after another, of which it is given the last."""
        num_rows, table = [read.num_rows for read in reads], next(self._tables)
        most, first = max(num_rows), len(reads[0].sequence) % STARTS
        NoContext.num_rows += sum(num_rows)
        ends = range(first + most, NUM_ROWS, most)
        return [table[end - own : end] for end, own in zip(ends, num_rows, strict=False)]

    def holds_tree(self, text: Text, num_tokens: int) -> bool:  # noqa: ARG002
        """Always."""
        return True

    def remove(self, text: Text) -> None:
        """Nothing."""


class NoEngine(Engine):
    """A model whose logits are random, and near those of others."""

    def __init__(self, vocab: int, seed: int) -> None:
        self.vocab_size = vocab
        common = torch.randn(NUM_ROWS, vocab, generator=torch.Generator().manual_seed(0))
        own = torch.randn(NUM_ROWS, vocab, generator=torch.Generator().manual_seed(1 + seed))
        self.table = 3 * common + 0.5 * own
        self._tables = (self.table, self.table.clone())

    def open(self, needs: Needs) -> NoContext:  # noqa: ARG002
        """An empty context."""
        return NoContext(self._tables)


def milliseconds(vocab: int, way: str, batch: int) -> tuple[float, float, float]:
    """The least processor time a round and a request, and that of reading its rows; and rounds a token."""
    ensemble = SpeculativeEnsemble(
        [NoEngine(vocab, seed) for seed in range(2)], ensemble=Mixture((0.5, 0.5)), **WAYS[way]
    )
    table = NoEngine(vocab, 0).table
    found, reading, rounds = [], [], 0.0
    for seed in range(REPEATS):
        NoContext.num_rows = 0
        started = time.thread_time()
        texts = list(
            ensemble.generate_many([[1, 2, 3]] * batch, batch_size=batch, seed=seed, max_new_tokens=NEW_TOKENS)
        )
        seconds = time.thread_time() - started
        rounds = sum(text.statistics.rounds for text in texts)
        found.append(1000 * seconds / rounds)
        started = time.thread_time()
        for _ in range(REPEATS):
            table.amax(-1)
        seconds_a_row = (time.thread_time() - started) / (REPEATS * len(table))
        reading.append(1000 * seconds_a_row * NoContext.num_rows / rounds)
    return min(found), min(reading), rounds / (batch * NEW_TOKENS)


def calls(way: str, batch: int) -> tuple[float, float]:
    """Of functions, and forwards of members, a round and request."""
    ensemble = SpeculativeEnsemble([NoEngine(64, seed) for seed in range(2)], ensemble=Mixture((0.5, 0.5)), **WAYS[way])
    job: dict[str, Any] = {"batch_size": batch, "seed": 0, "max_new_tokens": NEW_TOKENS}
    list(ensemble.generate_many([[1, 2, 3]] * batch, **job))  # what is made once
    with cProfile.Profile() as profile:
        texts = list(ensemble.generate_many([[1, 2, 3]] * batch, **job))
    rounds = sum(text.statistics.rounds for text in texts)
    forwards = sum(sum(text.statistics.forwards) for text in texts)
    return pstats.Stats(profile).total_calls / rounds, forwards / rounds  # type: ignore[attr-defined]


def bare(vocab: int) -> float:
    """Milliseconds of a round of `fixed` alone, without a driver; its text is not what one would write."""
    drafter, other = (NoEngine(vocab, seed).open(Needs(1)) for seed in range(2))
    text, prompt, num_drafts = NoText(), [1, 2, 3], WAYS["fixed"]["draft_lens"]
    ensemble, seeds, found = Mixture((0.5, 0.5)), torch.tensor([0]), []
    for settled in list(range(NEW_TOKENS)) * REPEATS:
        started = time.thread_time()
        random = {"seeds": seeds, "positions": torch.tensor([settled])}
        tokens, rows = [0] * settled, []
        for step in range(num_drafts):
            rows += drafter.read([Read(text, prompt + tokens, 1)])
            tokens.append(sample(rows[-1], step=step, **random).tokens.item())
        rows += drafter.read([Read(text, prompt + tokens, 1)])
        members = [torch.cat(rows)[None], other.read([Read(text, prompt + tokens, num_drafts + 1)])[0][None]]
        drafts = torch.tensor([tokens[settled:]])
        verify_chain(members, drafts, ensemble=ensemble, drafter=0, **random).tokens.tolist()
        found.append(1000 * (time.thread_time() - started))
    return min(found)


def main() -> None:
    """Print a JSON line for each way and batch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile", choices=WAYS)
    parser.add_argument("--batch", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.profile:
        with cProfile.Profile() as profile:
            milliseconds(64, options.profile, options.batch)
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)
        return
    for way in WAYS:
        for batch in (1, 16):
            (all_ms, reading, rounds), (own_ms, *_) = milliseconds(VOCAB, way, batch), milliseconds(64, way, batch)
            values = {"ms": round(all_ms, 3), "ms_at_vocab_64": round(own_ms, 3), "rounds_a_token": round(rounds, 2)}
            num_calls, forwards = calls(way, batch)
            values |= {"reading_share": round(reading / all_ms, 3), "calls": round(num_calls)}
            values |= {"forwards": round(forwards, 1), "ms_a_forward": round(own_ms / forwards, 3)}
            if (way, batch) == ("fixed", 1):
                values |= {"bare_ms": round(bare(VOCAB), 3), "bare_ms_at_vocab_64": round(bare(64), 3)}
            print(json.dumps({"way": way, "batch": batch, **values}), flush=True)


if __name__ == "__main__":
    main()
