"""The same requests in dense and in packed rows, with poison wherever nothing may be read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from problems import Problem, random_problem
from torch import Tensor

from specens_kernels import Verdict, verify_chain


@dataclass(frozen=True)
class Requests:
    """A problem in dense rows, of which request b uses lens[b] drafts and num_rows[b] rows. The rest is poison."""

    problem: Problem
    lens: list[int]
    num_rows: list[int]

    @property
    def offsets(self) -> Tensor:
        return torch.tensor([0, *self.num_rows]).cumsum(0)

    def packed_rows(self, values: Tensor, padding: int = 0) -> Tensor:
        return pack(values, self.num_rows, padding)

    def packed_drafts(self, values: Tensor, padding: int = 0) -> Tensor:
        return pack(values, self.lens, padding)


def poison(values: Tensor) -> Any:
    return float("nan") if values.is_floating_point() else torch.iinfo(values.dtype).min


def pack(values: Tensor, lens: list[int], padding: int) -> Tensor:
    """[rows + padding, ...]: the first lens[b] steps of each request, then poison."""
    parts = [values[request, :length] for request, length in enumerate(lens)]
    after = torch.full((padding, *values.shape[2:]), poison(values), dtype=values.dtype)
    return torch.cat([*parts, after])


def poisoned(values: Tensor, lens: list[int]) -> Tensor:
    """The same, with poison after the first lens[b] steps of each request."""
    steps = torch.arange(values.shape[1]) < torch.tensor(lens)[:, None]
    return torch.where(steps.reshape(*steps.shape, *[1] * (values.dim() - 2)), values, poison(values))


def ragged(seed: int, bonus: bool) -> Requests:
    """A random problem with a length for each request; what lies after its rows, drafts and uniforms is poison."""
    problem = random_problem(seed, (1, 33, 200))
    generator = torch.Generator().manual_seed(seed)
    batch, draft_len = problem.tokens.shape
    if problem.logits[0].shape[1] - draft_len != bonus:
        return ragged(seed + 10_000, bonus)
    lens = torch.randint(draft_len + 1, (batch,), generator=generator).tolist()
    rows = [length + bonus for length in lens]
    arguments = dict(problem.arguments)
    for name, own in (("allowed", rows), ("draft_logits", lens)):
        if arguments.get(name) is not None:
            arguments[name] = poisoned(arguments[name], own)
    random_numbers = poisoned(arguments["uniforms"][:, :-1], lens)
    arguments["uniforms"] = torch.cat([random_numbers, arguments["uniforms"][:, -1:]], 1)
    arguments["draft_lens"] = torch.tensor(lens)
    logits = [poisoned(values, rows) for values in problem.logits]
    return Requests(Problem(logits, problem.tokens, arguments), lens, rows)


def packed_arguments(requests: Requests, padding: int = 0) -> dict[str, Any]:
    """Packed drafts too."""
    problem, arguments = requests.problem, dict(requests.problem.arguments)
    del arguments["draft_lens"]
    arguments["row_offsets"] = requests.offsets
    arguments["max_draft_len"] = problem.tokens.shape[1]
    if arguments.get("allowed") is not None:
        arguments["allowed"] = requests.packed_rows(arguments["allowed"], padding)
    for name in ("draft_logits", "drafter"):
        if isinstance(arguments.get(name), Tensor):
            arguments[name] = requests.packed_drafts(arguments[name], padding)
    return arguments


def verify_packed(requests: Requests, backend: str, padding: int = 0, **changes: Any) -> Verdict:
    logits = [requests.packed_rows(values, padding) for values in requests.problem.logits]
    tokens = requests.packed_drafts(requests.problem.tokens, padding)
    return verify_chain(logits, tokens, backend=backend, **(packed_arguments(requests, padding) | changes))


def assert_equal(result: Verdict, expected: Verdict) -> None:
    for name, own, other in zip(Verdict._fields, result, expected, strict=True):
        assert (own is None and other is None) or torch.equal(own, other), (name, own, other)


def buffers(verdict: Verdict) -> Verdict:
    """Like these, filled with what must be overwritten."""
    return Verdict(*(None if value is None else torch.full_like(value, 77) for value in verdict))
