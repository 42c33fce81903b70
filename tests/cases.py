"""Random problems for the operations: each ensemble, drafter, dtype and layout, with plain and degenerate logits."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from in_turn import use_next
from torch import Tensor

from specens_kernels import (
    Contrastive,
    Draw,
    LogitMixture,
    Mixture,
    Sampling,
    Verdict,
    sample,
    target_logprobs,
    verify_chain,
)
from specens_kernels.ensembles import Ensemble

ENSEMBLES = ("none", "mixture", "mixture rows", "logit mixture", "logit mixture rows", "contrastive", "plausible")
DRAFTERS = ("one-hot", "member", "member a token", "outside")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("contiguous", "sliced", "steps first", "expanded")
TEMPERATURES: tuple[float | str, ...] = (1.0, 0.7, 0.0, "requests")
DEGENERATES = ("-inf", "nan", "+inf", "dead row")
# `make test-full` takes ten times as many random problems, and for Triton the shapes that the interpreter is slow at.
FULL = bool(os.environ.get("SPECENS_TEST_FULL"))
FULL_FACTOR = 10
# What torch traces of an operator is its schema and its fake kernel, which backends share; make test-full traces all.
TRACED_BACKENDS = ["cpp", "triton"] if FULL else ["cpp"]


@dataclass(frozen=True)
class Recipe:
    """What a case is made of. Every field is a choice that a test can fix or leave to chance."""

    batch: int = 3
    draft_len: int = 2
    bonus: bool = True
    vocabs: tuple[int, ...] = (33, 33)  # of the members; only the first counts without an ensemble
    ensemble: str = "none"
    drafter: str = "member"
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"
    temperature: float | str = 1.0
    draft_temperature: float | None = None
    ragged: bool = False
    seeded: bool = True
    degenerates: tuple[str, ...] = ()
    token_dtype: torch.dtype = torch.int64


@dataclass(frozen=True)
class Case:
    """The arguments of a call. `target` is what all operations take, `draft` only verification."""

    member_logits: list[Tensor]
    draft_tokens: Tensor
    target: dict[str, Any]
    draft: dict[str, Any] = field(default_factory=dict)
    random_numbers: dict[str, Tensor] = field(default_factory=dict)

    def verify(self, backend: str) -> Verdict:
        return verify_chain(
            self.member_logits,
            self.draft_tokens,
            **self.target,
            **self.draft,
            **self.random_numbers,
            logprobs=True,
            backend=backend,
        )

    def sample(self, backend: str, row: int = 0) -> Draw:
        """A draw from one row of the members, with the uniform of that row."""
        random_numbers = {
            name: value[:, row] if name == "uniforms" else value for name, value in self.random_numbers.items()
        }
        logits = [member[:, row] for member in self.member_logits]
        return sample(logits, **self.target, **random_numbers, step=row, logprobs=True, backend=backend)

    def target_logprobs(self, backend: str) -> Tensor:
        return target_logprobs(self.member_logits, **self.target, backend=backend)

    def requests(self, indices: Sequence[int]) -> Case:
        """The case of these requests only."""
        index = torch.tensor(indices, device=self.draft_tokens.device)
        return replace(
            self,
            member_logits=[logits[index] for logits in self.member_logits],
            draft_tokens=self.draft_tokens[index],
            target={name: _requests(value, index) for name, value in self.target.items()},
            draft={name: _requests(value, index) for name, value in self.draft.items()},
            random_numbers={name: value[index] for name, value in self.random_numbers.items()},
        )


def _requests(value: Any, index: Tensor) -> Any:
    if isinstance(value, Tensor):
        return value[index]
    if isinstance(value, Sampling) and isinstance(value.temperature, Tensor):
        return replace(value, temperature=value.temperature[index])
    if isinstance(value, Mixture | LogitMixture) and isinstance(value.weights, Tensor):
        return type(value)(value.weights[index])
    return value


def many(count: int) -> int:
    """So many random problems, or more in a full test."""
    return count * FULL_FACTOR if FULL else count


def random_recipe(rng: random.Random, vocabs: Sequence[int], batches: Sequence[int]) -> Recipe:
    ensemble = rng.choice(ENSEMBLES)
    degenerates = [name for name in DEGENERATES if rng.random() < 0.15]
    if "+inf" in degenerates and ensemble not in ("none", "mixture", "mixture rows"):
        degenerates.remove("+inf")  # sums of several largest floats have no common meaning in float32 and float64
    vocab = rng.choice(vocabs)
    members = 2 if ensemble in ("contrastive", "plausible") else rng.choice([2, 3])
    return Recipe(
        batch=rng.choice(batches),
        draft_len=rng.choice([0, 1, 2, 5]),
        bonus=rng.random() < 0.6,
        vocabs=tuple(max(1, vocab + rng.choice([0, 0, -1, 3])) for _ in range(members)),
        ensemble=ensemble,
        drafter=rng.choice(DRAFTERS),
        dtype=rng.choice(DTYPES),
        layout=rng.choice(LAYOUTS),
        temperature=rng.choice(TEMPERATURES),
        draft_temperature=rng.choice([None, None, 0.0, 0.5, 1.3]),
        ragged=rng.random() < 0.4,
        seeded=rng.random() < 0.5,
        degenerates=tuple(degenerates),
        token_dtype=rng.choice([torch.int64, torch.int32]),
    )


def build(recipe: Recipe, seed: int, device: torch.device | str = "cpu") -> Case:
    """Draw a case. The same recipe and seed give the same numbers on every device."""
    use_next(seed)
    generator = torch.Generator().manual_seed(seed)
    steps = recipe.draft_len + recipe.bonus
    vocabs = recipe.vocabs[:1] if recipe.ensemble == "none" else recipe.vocabs
    logits = [_logits([recipe.batch, steps, vocab], recipe, generator) for vocab in vocabs]
    ensemble = _ensemble(recipe, len(vocabs), generator)
    sampling = Sampling(temperature=_temperature(recipe, generator))
    tokens = _draft_tokens(logits, recipe, generator)
    draft = _draft(recipe, len(vocabs), max(vocabs), generator)
    random_numbers = _uniforms(recipe, generator)

    def moved(arguments: dict[str, Any]) -> dict[str, Any]:
        return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in arguments.items()}

    if isinstance(sampling.temperature, Tensor):
        sampling = Sampling(temperature=sampling.temperature.to(device))
    if isinstance(ensemble, Mixture | LogitMixture) and isinstance(ensemble.weights, Tensor):
        ensemble = type(ensemble)(ensemble.weights.to(device))
    if "draft_logits" in draft:
        draft["draft_logits"] = lay_out(draft["draft_logits"].to(device), recipe.layout)
    return Case(
        [lay_out(member.to(device), recipe.layout) for member in logits],
        lay_out(tokens.to(device), recipe.layout if recipe.layout != "expanded" else "sliced"),
        {"ensemble": ensemble, "sampling": sampling},
        moved(draft),
        moved(random_numbers),
    )


def tensors_of(result: Verdict | Draw) -> list[Tensor]:
    """The fields that were asked for."""
    return [value for value in result if value is not None]


def operator_arguments(operation: ModuleType, call: Callable[[str], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What `call("reference")` hands to the operator of an operation (a module of specens_kernels.ops)."""
    recorded: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    reference = operation.IMPLEMENTATIONS["reference"]

    def record(*arguments: Any, **options: Any) -> Any:
        recorded.append((arguments, options))
        return reference(*arguments, **options)

    with patch.dict(operation.IMPLEMENTATIONS, {"reference": record}):
        call("reference")
    return recorded[0]


def lay_out(values: Tensor, layout: str) -> Tensor:
    """The same numbers at other strides; "expanded" repeats the first request. What lies around is poison."""
    if layout == "sliced":
        poison = float("nan") if values.is_floating_point() else torch.iinfo(values.dtype).min
        sizes = [2 * values.shape[0] + 1, *(size + 3 for size in values.shape[1:])]
        view = torch.full(sizes, poison, dtype=values.dtype, device=values.device)[1::2]
        for dim in range(1, values.dim()):
            view = view.narrow(dim, 2, values.shape[dim])
        return view.copy_(values)
    if layout == "steps first":
        return values.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "expanded" and values.shape[0] > 0:
        return values[:1].expand(values.shape)
    return values.contiguous()


def far_apart(elements: int, dtype: torch.dtype, device: torch.device, folder: Path) -> Tensor:
    """A tensor of at least so many elements, on the CPU in a sparse file, of which only the used pages exist."""
    size = elements + 4096
    if device.type == "cpu":
        return torch.from_file(str(folder / "elements"), shared=True, size=size, dtype=dtype)
    return torch.empty(size, dtype=dtype, device=device)


def with_threads(count: int, call: Callable[[], Any]) -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return call()
    finally:
        torch.set_num_threads(threads)


def _logits(shape: list[int], recipe: Recipe, generator: torch.Generator) -> Tensor:
    """Normal logits; a tenth of the requests, at least one, is degenerate in each way of the recipe."""
    scale = (1.0, 3.0)[int(torch.randint(2, (1,), generator=generator))]
    logits = torch.randn(shape, generator=generator) * scale
    if logits.numel() == 0:
        return logits.to(recipe.dtype)
    for name in recipe.degenerates:
        for request in torch.randint(shape[0], (1 + shape[0] // 10,), generator=generator).tolist():
            step = int(torch.randint(shape[1], (1,), generator=generator))
            tokens = torch.randint(shape[2], (1 + shape[2] // 5,), generator=generator)
            if name == "dead row":
                logits[request, step] = -torch.inf
            else:
                logits[request, step, tokens] = float(name)
    return logits.to(recipe.dtype)


def _ensemble(recipe: Recipe, members: int, generator: torch.Generator) -> Ensemble | None:
    shares = torch.rand(recipe.batch if "rows" in recipe.ensemble else 1, members, generator=generator) + 1e-3
    if members > 1:
        shares[:, 0] *= torch.rand(len(shares), generator=generator) > 0.2  # a member without weight, now and then
    shares /= shares.sum(1, keepdim=True)
    signed = torch.cat([torch.ones(len(shares), 1), torch.randn(len(shares), members - 1, generator=generator)], 1)
    match recipe.ensemble:
        case "mixture":
            return Mixture(shares[0].tolist())
        case "mixture rows":
            return Mixture(shares)
        case "logit mixture":
            return LogitMixture(signed[0].tolist())
        case "logit mixture rows":
            return LogitMixture(signed)
        case "contrastive":
            return Contrastive(0.1)
        case "plausible":
            return Contrastive(0.5, plausibility=0.1)
    return None


def _temperature(recipe: Recipe, generator: torch.Generator) -> float | Tensor:
    """A number, or one a request, a third of them greedy."""
    if recipe.temperature != "requests":
        return float(recipe.temperature)
    values = 0.1 + 1.9 * torch.rand(recipe.batch, generator=generator)
    return values * (torch.rand(recipe.batch, generator=generator) > 1 / 3)


def _draft_tokens(logits: list[Tensor], recipe: Recipe, generator: torch.Generator) -> Tensor:
    """Likely tokens under the members' mean, so that chains are long, some unlikely ones and a few invalid ones."""
    vocab = max(member.shape[-1] for member in logits)
    rows = [torch.nan_to_num(member[:, : recipe.draft_len].float(), -99, 99, -99) for member in logits]
    padded = [torch.nn.functional.pad(row, (0, vocab - row.shape[-1]), value=-99.0) for row in rows]
    shape = (recipe.batch, recipe.draft_len)
    mean = torch.stack(padded).mean(0)
    drawn = torch.multinomial(mean.softmax(-1).reshape(-1, vocab), 1, generator=generator).reshape(shape)
    kind = torch.rand(shape, generator=generator)
    tokens = torch.where(kind < 0.5, mean.argmax(-1), drawn)
    tokens = torch.where(kind > 0.9, torch.randint(vocab, shape, generator=generator), tokens)
    tokens = torch.where(kind > 0.97, -1, torch.where(kind > 0.96, vocab, tokens))
    return tokens.to(recipe.token_dtype)


def _draft(recipe: Recipe, members: int, vocab: int, generator: torch.Generator) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    shape = (recipe.batch, recipe.draft_len)
    if recipe.drafter == "member":
        arguments["drafter"] = int(torch.randint(members, (1,), generator=generator))
    elif recipe.drafter == "member a token":
        arguments["drafter"] = torch.randint(-1, members, shape, generator=generator)
    elif recipe.drafter == "outside":
        size = max(1, vocab + (-2, 0, 3)[int(torch.randint(3, (1,), generator=generator))])
        arguments["draft_logits"] = _logits([*shape, size], recipe, generator)
    if recipe.draft_temperature is not None:
        arguments["draft_sampling"] = Sampling(temperature=recipe.draft_temperature)
    if recipe.ragged:
        arguments["draft_lens"] = torch.randint(recipe.draft_len + 1, (recipe.batch,), generator=generator)
    return arguments


def _uniforms(recipe: Recipe, generator: torch.Generator) -> dict[str, Tensor]:
    if not recipe.seeded:
        shape = (recipe.batch, recipe.draft_len + 1)
        return {"uniforms": torch.rand(shape, dtype=torch.float64, generator=generator)}
    seeds = torch.randint(-(2**62), 2**62, (recipe.batch,), generator=generator)
    return {"seeds": seeds, "positions": torch.randint(2**40, (recipe.batch,), generator=generator)}
