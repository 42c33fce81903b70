"""ngram_index: prompt lookup, a draft from what followed the last tokens when they occurred before."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from bench import bounds, peers
from bench.case import Bars, Case, Options, Rival, chosen_shapes
from bench.check import check_equal
from bench.inputs import LookupInputs
from specens_kernels import NgramIndex

SHAPES = ((1, 1_000), (1, 30_000), (1, 1_000_000), (64, 30_000))  # requests, tokens
DRAFT_LEN, NGRAM_SIZE = 8, 3  # of the rivals: the index looks at 32 tokens
COPIED = 12  # tokens that end the text, and occurred once before
VOCAB = 50_000
PROPOSE_SECONDS, BATCHED_SECONDS = 5e-6, 0.5e-6  # a request
BUILD_SECONDS = 4e-6  # a token
BARS = Bars(seconds=PROPOSE_SECONDS, speedup=10, over=("plain Python",))


def cases(options: Options) -> Iterator[Case]:
    """A draft after texts of many lengths, for one request and for a batch; and the time to read a text."""
    if options.backend != "cpp":
        raise RuntimeError(f"ngram_index: there is no backend {options.backend!r} of a host object")
    for batch, size in chosen_shapes(options, SHAPES):
        inputs = lookup_inputs(size)
        yield _proposing(options, inputs) if batch == 1 else _proposing_for_all(inputs, batch)
    for batch, size in chosen_shapes(options, SHAPES):
        if batch == 1:
            yield _reading("skewed random", lookup_inputs(size))
            yield _reading("one token, repeated", repeated_inputs(size))


def lookup_inputs(size: int) -> LookupInputs:
    """A text of skewed random tokens whose last tokens are rare ones, copied from its middle."""
    generator = np.random.default_rng(0)
    text = generator.zipf(1.3, size).astype(np.int64) % VOCAB
    middle = slice(size // 2, size // 2 + COPIED + DRAFT_LEN)
    text[middle] = VOCAB + generator.permutation(COPIED + DRAFT_LEN)
    text[-COPIED:] = text[middle][:COPIED]
    return LookupInputs(text, torch.from_numpy(text[middle][COPIED:].copy()), DRAFT_LEN, NGRAM_SIZE)


def repeated_inputs(size: int) -> LookupInputs:
    """A text whose every token has as many n-grams with followers as are looked at."""
    expected = torch.ones(DRAFT_LEN, dtype=torch.int64)
    return LookupInputs(np.ones(size, dtype=np.int64), expected, DRAFT_LEN, NGRAM_SIZE)


def plain_lookup(text: list[int]) -> list[int]:
    """What followed the last tokens when they occurred last, the longest n-gram first."""
    for size in range(NGRAM_SIZE, 0, -1):
        ngram = text[-size:]
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - 1] == ngram[-1] and text[end - size : end] == ngram:
                return text[end : end + DRAFT_LEN]
    return []


def _proposing(options: Options, inputs: LookupInputs) -> Case:
    index, tokens = NgramIndex(inputs.text), inputs.text.tolist()
    rivals = {"plain Python": Rival(lambda: torch.tensor(plain_lookup(tokens)), checked=True)}
    return Case(
        shape={"requests": 1, "tokens": len(inputs.text)},
        setting={"what": "propose"},
        dtype="-",
        run=lambda: index.propose(DRAFT_LEN),
        result=lambda proposal: torch.from_numpy(proposal[0]),
        check=lambda draft: check_equal(draft, inputs.expected),
        bounds=bounds.copying_arrays([inputs.text[-DRAFT_LEN:]]),
        bytes_needed=DRAFT_LEN * 8,
        rivals=rivals | peers.rivals("ngram_index", options, inputs),
        bars=BARS,
        table="a draft",
    )


def _proposing_for_all(inputs: LookupInputs, batch: int) -> Case:
    indices = [NgramIndex(inputs.text)] * batch
    expected = inputs.expected.expand(batch, DRAFT_LEN)
    return Case(
        shape={"requests": batch, "tokens": len(inputs.text)},
        setting={"what": "propose_batch"},
        dtype="-",
        run=lambda: NgramIndex.propose_batch(indices, DRAFT_LEN),
        result=lambda proposals: torch.from_numpy(proposals[0]),
        check=lambda drafts: check_equal(drafts, expected),
        bounds=bounds.copying_arrays([expected.numpy()]),
        bytes_needed=batch * DRAFT_LEN * 8,
        rivals={},
        bars=Bars(seconds=BATCHED_SECONDS * batch),
        table="a draft",
    )


def _reading(text: str, inputs: LookupInputs) -> Case:
    size = len(inputs.text)
    return Case(
        shape={"requests": 1, "tokens": size},
        setting={"text": text},
        dtype="-",
        run=lambda: NgramIndex(inputs.text),
        result=lambda index: torch.from_numpy(index.propose(DRAFT_LEN)[0]),
        check=lambda draft: check_equal(draft, inputs.expected),
        bounds=bounds.copying_arrays([inputs.text]),
        bytes_needed=inputs.text.nbytes,
        rivals={},
        bars=Bars(seconds=BUILD_SECONDS * size),
        table="an index of a text",
    )
