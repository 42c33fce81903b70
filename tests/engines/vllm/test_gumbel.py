"""vLLM with SPECENS_VLLM_RULE=gumbel: a seed is a text, with speculation and without."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from engines.vllm.exact_law import p_value
from engines.vllm.test_engine import BIASED, FILTERED, PENALISED, PLAIN, laws, request
from specens.adapters.vllm import v1, v2
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.watermarking.gpu_sampler import GPUWatermarkSampler

from specens_kernels import Sampling, sample

__all__ = ["laws"]

SEEDS = 600


def test_a_seed_is_a_text_with_speculation_and_without(texts, target, speculation, laws):
    seeded = [request(settings, length=24, seed=5) for settings in (PLAIN, FILTERED, PENALISED, BIASED)]
    seeded.append(request(PLAIN, length=24, seed=5, logprob_token_ids=[3, 4]))  # which vLLM's own sampler reports
    others = [request(PLAIN, 13, length=20), request(FILTERED, 4, length=31, prompt=[5, 6, 7])]
    many = [request(settings, length=2, seed=seed) for settings in (PLAIN, FILTERED) for seed in range(SEEDS)]
    expected = None
    for drafter in ("none", "n-gram", "drawn drafts"):
        batches = [seeded[:4], [*others, *seeded[::-1]], many]
        result = texts(target, batches, speculation[drafter], rule="gumbel", skip_tokenizer_init=True)
        alone, mixed, drawn = ([completion["tokens"] for completion in batch] for batch in result["batches"])
        expected = expected or (alone, drawn)
        assert (alone, drawn) == expected
        assert mixed[17:] == [alone[0], *alone[::-1]]
        assert len(set(map(tuple, mixed[:13]))) > 1  # without a seed
        if drafter != "none":
            assert 0 < result["accepted"] < result["drafts"]
    fits = [p_value(law.sum(2), drawn[start : start + SEEDS]) for start, law in zip((0, SEEDS), laws)]
    assert min(fits) > 1e-4, fits


def batch_of_two(*processors, **settings):
    """A greedy request, and one with seed 9 at temperature .5."""
    fields = dict.fromkeys(SamplingMetadata.__dataclass_fields__)
    fields |= {"temperature": torch.tensor([0.0, 0.5]), "all_greedy": False, "all_random": False}
    fields |= {"generators": {1: torch.Generator().manual_seed(9)}, "no_penalties": True, "output_token_ids": [[], []]}
    fields |= {"bad_words_token_ids": {}, "logitsprocs": LogitsProcessors(processors)}
    return SamplingMetadata(**fields | settings)


class Squared:
    """A logits processor of a user's own, which vLLM runs between temperature and top-k."""

    @staticmethod
    def is_argmax_invariant():
        return True

    @staticmethod
    def apply(logits):
        return logits.square()


def by_gumbel(logits, **settings):
    """Of the second request, whose first token has the position 30."""
    draw = sample(
        logits[1:],
        sampling=Sampling(**settings),
        seeds=torch.tensor([9]),
        positions=torch.tensor([30]),
        method="gumbel",
    )
    return draw.tokens[0]


def test_logits_processors_of_users_stand_between_temperature_and_top_k():
    logits, positions = torch.rand(2, 40, generator=torch.Generator().manual_seed(0)) * 3, torch.tensor([8, 30])
    before = logits.clone()
    for kinds, row, temperature in (([], logits, 0.5), ([Squared()], (logits / 0.5).square(), 1.0)):
        batch = batch_of_two(*kinds, top_k=torch.tensor([40, 7]))
        tokens = v1.drawn_by_gumbel(Sampler(), logits, batch, positions)
        assert tokens.tolist() == [logits[0].argmax(), by_gumbel(row, temperature=temperature, top_k=7)]
        assert torch.equal(logits, before)
        assert v1.needs_vllm(batch) == bool(kinds)


def test_the_sampler_reports_processed_logits_as_vllm_does():
    logits, positions = torch.randn(2, 40, generator=torch.Generator().manual_seed(0)), torch.tensor([8, 30])
    batch, sampler = batch_of_two(top_k=torch.tensor([40, 7]), max_num_logprobs=2), Sampler("processed_logprobs")
    _, expected = Sampler.sample(sampler, logits.clone(), replace(batch, generators={}))
    setattr(sampler, v1.FIRST_POSITIONS, positions)
    tokens, report = v1._drawing_by_gumbel(Sampler.sample)(sampler, logits.clone(), batch)
    assert tokens.tolist() == [logits[0].argmax(), by_gumbel(logits, temperature=0.5, top_k=7)]
    assert torch.equal(report, expected)
    assert not hasattr(sampler, v1.FIRST_POSITIONS)


def test_other_rules_and_watermarks_are_refused():
    blocks, device = SimpleNamespace(rejection_sample_method="block"), torch.device("cpu")
    constructs = [v1._keeping_its_rule("gumbel", RejectionSampler.__init__), v2._keeping_its_rule("gumbel", None)]
    for construct in constructs:
        with pytest.raises(ValueError, match=r"rejection_sample_method: expected 'standard' .*, got 'block'"):
            construct(SimpleNamespace(), Sampler(), blocks, device)
    (watermarks,) = (found for found in v2.replacements("gumbel") if found.owner is GPUWatermarkSampler)
    with pytest.raises(ValueError, match="watermark_config: expected none with SPECENS_VLLM_RULE=gumbel"):
        watermarks.make(watermarks.owner.__init__)(SimpleNamespace(), None)
