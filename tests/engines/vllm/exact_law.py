"""The law of a tiny model's texts, enumerated, and how well drawn texts fit it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import torch
from scipy import stats
from torch import Tensor
from transformers import AutoModelForCausalLM

from specens_kernels import Processing, Sampling, target_logprobs
from specens_kernels.ensembles import Ensemble


def exact_law(
    folder: Path | Sequence[Path],
    prompt: list[int],
    length: int,
    sampling: Sampling,
    allowed: Tensor | None = None,
    logit_bias: tuple[Tensor, Tensor] | None = None,
    ensemble: Ensemble | None = None,
    **penalties: float,
) -> Tensor:
    """Probabilities float64 [vocab] * length of each text after the prompt.

    folder: of the model, or of each member of the ensemble. allowed: int32 [words], or [length, words].
    logit_bias: tokens and values, each [n]. penalties: fields of Processing.
    """
    folders = [folder] if isinstance(folder, Path) else folder
    models = [AutoModelForCausalLM.from_pretrained(member, dtype=torch.float64) for member in folders]
    vocab = max(model.config.vocab_size for model in models)
    law = torch.zeros((), dtype=torch.float64)
    for written in range(length):
        count = vocab**written
        outputs = torch.tensor(list(itertools.product(range(vocab), repeat=written)), dtype=torch.int64)
        outputs, prompts = outputs.view(count, written), torch.tensor(prompt).expand(count, -1)
        with torch.no_grad():
            texts = torch.cat((prompts, outputs), 1)
            # To a member, a token that it does not know is its last one.
            logits = [model(texts.clamp(max=model.config.vocab_size - 1)).logits[:, -1].float() for model in models]
        bias = None if logit_bias is None else tuple(part.expand(count, -1) for part in logit_bias)
        edits = Processing(logit_bias=bias, prompt_tokens=prompts, output_tokens=outputs, **penalties)
        bits = None if allowed is None else allowed.expand(length, -1)[written].expand(count, -1)
        target = {"sampling": sampling, "processing": edits, "allowed": bits, "ensemble": ensemble}
        logprobs = target_logprobs(logits, **target, backend="reference")
        law = law[..., None] + logprobs.double().view(*[vocab] * (written + 1))
    return law.exp()


def p_value(law: Tensor, texts: list[list[int]]) -> float:
    """Of a chi-square test; texts that are expected fewer than 5 times are one class. 0 for an impossible text."""
    seen = torch.zeros_like(law)
    for text in texts:
        seen[tuple(text)] += 1
    if bool((seen[law == 0] > 0).any()):
        return 0.0
    expected = (law * len(texts)).flatten()
    seen, common = seen.flatten(), expected >= 5
    expected = torch.cat((expected[common], expected[~common].sum()[None]))
    seen = torch.cat((seen[common], seen[~common].sum()[None]))
    kept = expected > 0
    statistic = ((seen - expected)[kept] ** 2 / expected[kept]).sum()
    return float(stats.chi2.sf(float(statistic), int(kept.sum()) - 1))
