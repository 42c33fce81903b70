"""Random rounds that use everything verification takes: processing, bit masks, filters, rules, reports.

Results are compared request by request. One that differs must hang on the last bits: moving uniforms and thresholds by
a hair makes the reference decide as the backend did.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from cases import lay_out
from in_turn import use_next
from torch import Tensor

from specens_kernels import (
    Contrastive,
    DecisionTree,
    LogitMixture,
    Mixture,
    Processing,
    Replacement,
    Sampling,
    Synthetic,
    Threshold,
    Typical,
    Verdict,
    target_logprobs,
    verify_chain,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NUDGE = 2e-6  # by which uniforms and thresholds are moved
SET_ASIDE = 0.02  # the share of requests that may be decided otherwise
LOGPROBS = {"atol": 5e-5, "rtol": 1e-5}


@dataclass(frozen=True)
class Problem:
    """Arguments of verify_chain, in dense rows."""

    logits: list[Tensor]
    tokens: Tensor
    arguments: dict[str, Any]

    def verify(self, backend: str, **changes: Any) -> Verdict:
        return verify_chain(self.logits, self.tokens, backend=backend, **(self.arguments | changes))

    def target(self) -> dict[str, Any]:
        """The arguments that other operations take too."""
        return {name: self.arguments[name] for name in ("ensemble", "sampling", "processing", "allowed")}

    def hangs_on_the_last_bits(self, request: int, emitted: list[int]) -> bool:
        for amount in (-NUDGE, NUDGE):
            moved = {"sampling": _nudged(self.arguments["sampling"], amount)}
            if "draft_sampling" in self.arguments:
                moved["draft_sampling"] = _nudged(self.arguments["draft_sampling"], amount)
            random_numbers = {"uniforms": (self.arguments["uniforms"] + amount).clamp(0, 1 - 1e-12)}
            rule = {"rule": _nudged_rule(self.arguments["rule"], amount)}
            for change in (moved, random_numbers, moved | random_numbers, rule, rule | moved):
                if self.verify("reference", **change).tokens[request].tolist() == emitted:
                    return True
        return False


class Judge:
    """Compares the verdicts of many problems, and how many requests were set aside in all of them."""

    def __init__(self) -> None:
        self.requests = 0
        self.set_aside = 0

    def compare(self, problem: Problem, result: Verdict, expected: Verdict, name: object) -> Tensor:
        """bool [batch]: which requests were decided alike; the others hang on the last bits."""
        same = (result.tokens == expected.tokens).all(1) & (result.status == expected.status)
        for request in (~same).nonzero()[:, 0].tolist():
            own = result.tokens[request].tolist()
            assert problem.hangs_on_the_last_bits(request, own), (name, request, result, expected)
        for field in ("num_accepted", "num_tokens", "next_token"):
            assert torch.equal(getattr(result, field)[same], getattr(expected, field)[same]), (name, field)
        if expected.logprobs is not None:
            torch.testing.assert_close(result.logprobs[same], expected.logprobs[same], **LOGPROBS)
        self.requests += len(same)
        self.set_aside += int((~same).sum())
        return same

    def finish(self, at_least: int) -> None:
        assert self.requests >= at_least
        assert self.set_aside <= max(1, SET_ASIDE * self.requests), f"{self.set_aside} of {self.requests}"


def _nudged(sampling: Sampling, amount: float) -> Sampling:
    def move(value: Any) -> Any:
        if value is None or (not isinstance(value, Tensor) and value in (0.0, 1.0)):
            return value
        moved = (torch.as_tensor(value) * (1 + amount)).clamp(1e-30, 1.0)
        return moved if isinstance(value, Tensor) else float(moved)

    return replace(sampling, top_p=move(sampling.top_p), min_p=move(sampling.min_p))


def _nudged_rule(rule: Any, amount: float) -> Any:
    """A rule that compares probabilities with numbers, these moved."""
    factor = 1 + amount
    if isinstance(rule, Threshold):
        return Threshold(min(rule.probability * factor, 1.0))
    if isinstance(rule, Replacement):
        return Replacement(min(rule.alpha * factor, 1.0), rule.beta * factor)
    if isinstance(rule, DecisionTree):
        return replace(rule, threshold=[threshold * factor for threshold in rule.threshold])
    return rule


class Maker:
    """Draws the parts of a problem. The same seed gives the same problem."""

    def __init__(self, seed: int, vocabs: Sequence[int]) -> None:
        self.choice, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.vocab = self.choice.choice(vocabs)
        self.batch, self.draft_len = self.choice.choice([1, 2, 5]), self.choice.choice([0, 1, 2, 4])
        self.bonus = self.choice.random() < 0.6
        self.members = self.choice.choice([1, 1, 2, 3])

    def chance(self, probability: float) -> bool:
        return self.choice.random() < probability

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        return torch.rand(shape, generator=self.generator) * (high - low) + low

    def laid_out(self, values: Tensor) -> Tensor:
        return lay_out(values, self.choice.choice(["contiguous", "sliced"]))

    def number(self, low: float, high: float) -> float | Tensor:
        if self.chance(0.5):
            return self.choice.uniform(low, high)
        return self.laid_out(self.uniform(self.batch, low=low, high=high))

    def logits(self, steps: int, vocab: int) -> Tensor:
        values = torch.randn(self.batch, steps, vocab, generator=self.generator) * self.choice.choice([1.0, 3.0])
        for poison in (-torch.inf, torch.nan):
            if values.numel() > 0 and self.chance(0.15):
                indices = torch.randint(0, values.numel(), (1 + vocab // 20,), generator=self.generator)
                values.view(-1)[indices] = poison
        return self.laid_out(values.to(self.choice.choice(DTYPES)))

    def table(self, width: int, likely: Tensor) -> Tensor:
        """Token ids [batch, width]: likely ones, any, repeated ones, and padding on both sides of the vocabulary."""
        shape = (self.batch, width)
        values = torch.randint(0, self.vocab, shape, generator=self.generator)
        kind = self.uniform(*shape)
        near = likely.reshape(self.batch, -1)
        if near.shape[1] > 0 and width > 0:
            columns = torch.randint(0, near.shape[1], shape, generator=self.generator)
            values = torch.where(kind < 0.5, near.gather(1, columns), values)
        far = self.choice.choice([self.vocab + 2, self.vocab + 5000, 2**31 - 1])
        values = torch.where(kind > 0.9, -1, torch.where(kind > 0.85, far, values))
        return self.laid_out(values.to(self.choice.choice([torch.int64, torch.int32])))

    def processing(self, likely: Tensor) -> Processing | None:
        if self.chance(0.1):
            return None
        parts: dict[str, Any] = {}
        if self.chance(0.5):
            tokens = self.table(self.choice.choice([0, 1, 6]), likely)
            values = torch.randn(tokens.shape, generator=self.generator) * 2
            values[self.uniform(*tokens.shape) < 0.2] = -torch.inf
            parts["logit_bias"] = (tokens, self.laid_out(values).to(self.choice.choice([torch.float32, torch.float64])))
        if self.chance(0.5):
            parts["repetition_penalty"] = self.number(0.5, 2.0)
        if self.chance(0.5):
            parts["frequency_penalty"] = self.number(-1.0, 2.0)
        if self.chance(0.5):
            parts["presence_penalty"] = self.number(-1.0, 2.0)
        if self.chance(0.5):
            parts["end_tokens"] = self.table(self.choice.choice([1, 3]), likely)
            if self.chance(0.5):
                parts["end_tokens"] = parts["end_tokens"][0]
            lens = torch.randint(-1, self.draft_len + 2, (self.batch,), generator=self.generator)
            parts["min_tokens"] = self.choice.choice([lens, lens.int(), int(lens[0]), 1, 2**40])
        for name in ("prompt_tokens", "output_tokens"):
            if self.chance(0.5):
                parts[name] = self.table(self.choice.choice([0, 1, 20]), likely)
        return Processing(**parts)

    def mask(self, rows: int) -> Tensor | None:
        """Words [batch, rows, words], fewer or more than the vocabulary needs; seven of eight bits are set."""
        if self.chance(0.4):
            return None
        words = max(1, (self.vocab + 31) // 32 + self.choice.choice([0, 0, -1, 2]))
        bits = torch.zeros(self.batch, rows, words, dtype=torch.int32)
        for _ in range(3):
            bits |= torch.randint(-(2**31), 2**31, bits.shape, generator=self.generator, dtype=torch.int32)
        if rows > 0 and self.chance(0.2):
            bits[0, self.choice.randrange(rows)] = 0
        return self.laid_out(bits)

    def ensemble(self) -> Any:
        weights = self.uniform(self.members, low=0.1, high=1.0)
        rows = self.uniform(self.batch, self.members, low=0.1, high=1.0)
        ensembles: list[Any] = [
            Mixture((weights / weights.sum()).tolist(), filter=self.choice.choice(["mixture", "members"])),
            Mixture(rows / rows.sum(1, keepdim=True)),
            LogitMixture((weights - 0.2).tolist()),
        ]
        if self.members == 1:
            ensembles += [None, None, None]
        if self.members == 2:
            ensembles += [Contrastive(0.2), Contrastive(0.2, 0.1)]
        return self.choice.choice(ensembles)

    def sampling(self) -> Sampling:
        some = self.uniform(self.batch, low=0.2, high=1.5) * (self.uniform(self.batch) < 0.7)
        filters: dict[str, Any] = {}
        if self.chance(0.4):
            top_k = torch.randint(-1, 40, (self.batch,), generator=self.generator)
            filters["top_k"] = self.choice.choice([1, 2, 50, top_k])
        if self.chance(0.4):
            filters["top_p"] = self.number(0.1, 1.0)
        if self.chance(0.3):
            filters["min_p"] = self.number(0.0, 0.9)
        if self.chance(0.3):
            filters["filter_order"] = "vllm"
        return Sampling(temperature=self.choice.choice([1.0, 1.0, 0.7, 0.0, some]), **filters)

    def draft(self, widest: int) -> dict[str, Any]:
        arguments: dict[str, Any] = {"process_drafts": self.chance(0.6)}
        shape = (self.batch, self.draft_len)
        kind = self.choice.choice(["one-hot", "member", "member a token", "outside"])
        if kind == "member":
            arguments["drafter"] = self.choice.randrange(self.members)
        elif kind == "member a token":
            arguments["drafter"] = torch.randint(-1, self.members, shape, generator=self.generator)
        elif kind == "outside":
            arguments["draft_logits"] = self.logits(self.draft_len, max(1, widest + self.choice.choice([0, -2, 40])))
        if self.chance(0.3):
            arguments["draft_sampling"] = self.sampling()
        return arguments

    def rule(self) -> Any:
        rates = tuple(self.choice.random() for _ in range(self.draft_len))
        return self.choice.choice(
            ["token", "token", "token", "block", "block", "typical", Typical(0.5, 0.4), Synthetic(rates)]
        )


def random_problem(seed: int, vocabs: Sequence[int]) -> Problem:
    use_next(seed)
    maker = Maker(seed, vocabs)
    rows, shape = maker.draft_len + maker.bonus, (maker.batch, maker.draft_len)
    logits = [maker.logits(rows, max(1, maker.vocab - maker.choice.choice([0, 0, 1]))) for _ in range(maker.members)]
    widest = max(values.shape[-1] for values in logits)
    likely = torch.nan_to_num(logits[0][:, : maker.draft_len].float(), -99.0).argmax(-1)
    target = {
        "ensemble": maker.ensemble(),
        "sampling": maker.sampling(),
        "processing": maker.processing(likely),
        "allowed": maker.mask(rows),
    }
    if shape[1] > 0 and maker.chance(0.8):
        likely = target_logprobs(logits, backend="reference", **target)[:, : maker.draft_len].argmax(-1)
    tokens = torch.where(
        maker.uniform(*shape) < 0.6, likely, torch.randint(0, widest, shape, generator=maker.generator)
    )
    tokens = torch.where(maker.uniform(*shape) > 0.97, -1, tokens)
    arguments = {
        **target,
        "rule": maker.rule(),
        "uniforms": torch.rand(maker.batch, maker.draft_len + 1, dtype=torch.float64, generator=maker.generator),
        "logprobs": True,
        **maker.draft(widest),
    }
    if maker.chance(0.3):
        arguments["draft_lens"] = torch.randint(maker.draft_len + 1, (maker.batch,), generator=maker.generator)
    return Problem(logits, maker.laid_out(tokens.to(maker.choice.choice([torch.int64, torch.int32]))), arguments)
