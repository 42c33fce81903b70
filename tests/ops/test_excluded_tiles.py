"""Rows of which any tiles are excluded, with logits anywhere, on every instruction set: the reference's tokens."""

from __future__ import annotations

import math

import torch
from cases import many
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from specens_kernels import Sampling, instruction_set, sample, target_logprobs, verify_chain, verify_tree

TILE = 2048  # of the C++ kernels; three of them and a part of a fourth
VOCAB = 3 * TILE + 77
TILES = 4
DRAFTS = 2
NOISE = 2.0**-23  # of float32, of the largest exponent
INF = math.inf


@st.composite
def rows(draw):
    """Exponents (logits / temperature) [1, DRAFTS + 1, VOCAB], a temperature, and which tiles of each row are dead.

    The tokens of a tile lie around a level of its own.
    """
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    spread = draw(st.sampled_from([0.0, 1.0, 30.0, 300.0]))
    near = draw(st.sampled_from([0.0, 5.0, 60.0, 85.0, 90.0, 1e4]))  # how far apart the levels of tiles may be
    base = draw(st.floats(-1e4, 1e4))
    levels = torch.tensor(draw(st.lists(st.floats(-1, 1), min_size=3 * TILES, max_size=3 * TILES))).reshape(3, TILES)
    wide = (base + near * levels).repeat_interleave(TILE, 1)[:, :VOCAB]
    exponents = (wide + spread * torch.randn(wide.shape, generator=generator)).clamp(-1e4, 1e4)
    dead = torch.tensor(draw(st.lists(st.booleans(), min_size=3 * TILES, max_size=3 * TILES))).reshape(3, TILES)
    thin = draw(st.sampled_from([1.0, 0.01]))  # the share of a tile's tokens that are left
    excluded = dead.repeat_interleave(TILE, 1)[:, :VOCAB] | (torch.rand(wide.shape, generator=generator) > thin)
    temperature = draw(st.sampled_from([1.0, 0.1, 7.0, 1e-30, 1e-38, 1e-45, 1e30, 1e34]))
    logits = (exponents.double() * temperature).float()
    return logits[None], temperature, excluded[None], generator


def noise_of(logits: Tensor, temperature: float, excluded: Tensor) -> float:
    largest = torch.where(excluded, 0.0, logits.double()).abs().max()
    return NOISE * (1 + float(largest) / temperature)


def results(logits: Tensor, given: dict, drafts: Tensor, random_numbers: Tensor, backend: str) -> dict[str, Tensor]:
    """What each operation says of these rows."""
    settings = {**given, "backend": backend}
    first = {name: value[:, 0] for name, value in given.items() if name == "allowed"}
    tree = {"parents": torch.tensor([[-1, -1]]), "siblings": "with_replacement", "drafter": 0}
    return {
        "sample": sample(logits[:, 0], uniforms=random_numbers[:, 0], **(settings | first)).tokens,
        "chain": verify_chain(logits, drafts, drafter=0, uniforms=random_numbers, **settings).tokens,
        "block": verify_chain(logits, drafts, drafter=0, rule="block", uniforms=random_numbers, **settings).tokens,
        "one-hot": verify_chain(logits, drafts, uniforms=random_numbers, **settings).tokens,
        "tree": verify_tree(logits, drafts, uniforms=random_numbers, **(settings | tree)).tokens,
    }


@given(case=rows(), masked=st.booleans(), random_numbers=st.lists(st.floats(1e-3, 0.999), min_size=3, max_size=3))
@settings(max_examples=many(25), deadline=None, suppress_health_check=list(HealthCheck))
def test_any_tiles_may_be_excluded(case, masked, random_numbers):
    """Other decisions than the reference's hang on the last bits: moving the uniforms by these makes it decide so."""
    logits, temperature, excluded, generator = case
    uniforms = torch.tensor([random_numbers], dtype=torch.float64)
    given = {"sampling": Sampling(temperature=temperature)}
    if masked:
        given["allowed"] = packed(~excluded)
    else:
        logits = torch.where(excluded, -INF, logits)
    drafts = torch.stack([likely(logits[0, row], excluded[0, row], generator) for row in range(DRAFTS)])[None]
    logprobs = target_logprobs(logits, draft_tokens=drafts, backend="reference", **given)
    noise = noise_of(logits, temperature, excluded)
    wanted = [results(logits, given, drafts, uniforms, "reference")]
    for name in instruction_set.available():
        instruction_set.use(name)
        own = target_logprobs(logits, draft_tokens=drafts, backend="cpp", **given)
        assert (own <= 0).all()
        assert (own[excluded] == -INF).all()
        assert torch.allclose(own.clamp(min=-1e30), logprobs.clamp(min=-1e30), rtol=1e-6, atol=4 * noise), name
        tokens = results(logits, given, drafts, uniforms, "cpp")
        if len(wanted) == 1 and not all(torch.equal(tokens[operation], wanted[0][operation]) for operation in tokens):
            shifts = (4 * noise, -4 * noise)
            wanted += [results(logits, given, drafts, (uniforms + by).clamp(0, 0.9999), "reference") for by in shifts]
        for operation, own_tokens in tokens.items():
            assert any(torch.equal(own_tokens, other[operation]) for other in wanted), (name, operation, own_tokens)


def likely(logits: Tensor, excluded: Tensor, generator: torch.Generator) -> Tensor:
    """The most likely token or, as often, any."""
    if torch.rand((), generator=generator) < 0.5:
        return torch.where(excluded, -INF, logits).argmax()
    return torch.randint(VOCAB, (), generator=generator)


def packed(kept: Tensor) -> Tensor:
    """Bits of a mask, int32 words."""
    padded = torch.nn.functional.pad(kept, (0, -kept.shape[-1] % 32)).unflatten(-1, (-1, 32)).long()
    return (padded << torch.arange(32)).sum(-1).to(torch.int32)
