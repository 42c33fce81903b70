"""Every operation on CUDA tensors against the CPU, token by token: `python -m bench.gpu.checks`.

Each case runs eagerly three times (launched, recorded, replayed) and, where its operation can be captured, from a CUDA
graph whose inputs are changed between replays. One that fails leaves the others. `--launch-only` is for sanitizers.
Without a GPU the cases run on CPU tensors, without graphs.
"""

from __future__ import annotations

import json
import math
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor

import specens_kernels as sk
from specens_kernels.parts.launches import dependent_launches

BATCH, DRAFT_LEN, VOCAB = 6, 4, 5000
CLOSE = {"atol": 2e-3, "rtol": 2e-3}  # of log-probabilities and attention in bfloat16
NEAR_TIES = 1  # requests of a case whose tokens may hang on the last bits
SERVED_BY_TRITON = ("verify_chain", "verify_tree", "sample", "target_logprobs")
Make = Callable[[torch.Generator], dict[str, Any]]


class Case(NamedTuple):
    """An operation, what makes its arguments on the CPU, and whether a graph can capture it."""

    name: str
    operation: str
    make: Make
    graph: bool = True


def logits_of(generator: torch.Generator, rows: tuple[int, ...], like: Tensor | None = None) -> Tensor:
    noise = torch.randn(*rows, VOCAB, generator=generator)
    values = noise * 3 if like is None else like.float() + noise * 0.7
    return values.to(torch.bfloat16)


def uniforms_of(generator: torch.Generator) -> dict[str, Tensor]:
    return {name: torch.randint(2**31, (BATCH,), generator=generator) for name in ("seeds", "positions")}


def filters_by_request() -> sk.Sampling:
    temperatures = torch.tensor([0.0, 0.5, 0.7, 1.0, 1.3, 1.0])
    return sk.Sampling(temperatures, torch.tensor([50, 0, 10, 1, 200, 40]), torch.linspace(0.7, 1.0, BATCH))


def chain(generator: torch.Generator, members: int = 1, draft: str = "outside", **changes: Any) -> dict[str, Any]:
    first = logits_of(generator, (BATCH, DRAFT_LEN + 1))
    others = [logits_of(generator, first.shape[:2], first) for _ in range(members - 1)]
    drafted = logits_of(generator, (BATCH, DRAFT_LEN), first[:, :DRAFT_LEN])
    given: dict[str, Any] = {"member_logits": [first, *others], "draft_tokens": drafted.argmax(-1)}
    given |= {"draft_logits": drafted} if draft == "outside" else {"drafter": 0} if draft == "member" else {}
    return given | uniforms_of(generator) | changes


def packed_chain(generator: torch.Generator, **changes: Any) -> dict[str, Any]:
    dense, lens = chain(generator), torch.tensor([4, 0, 2, 4, 1, 3])
    used = torch.arange(DRAFT_LEN + 1) <= lens[:, None]
    drafts = torch.arange(DRAFT_LEN) < lens[:, None]
    offsets = torch.nn.functional.pad((lens + 1).cumsum(0), (1, 0))
    packed = {"member_logits": [dense["member_logits"][0][used]], "draft_tokens": dense["draft_tokens"][drafts]}
    packed |= {"row_offsets": offsets, "max_draft_len": DRAFT_LEN, "draft_slots": torch.arange(BATCH).flip(0)}
    return dense | packed | changes


def tree(generator: torch.Generator, **changes: Any) -> dict[str, Any]:
    parents = torch.tensor([-1, -1, 0, 0, 1, 3]).repeat(BATCH, 1)
    parents[0, 4:] = -2
    first = logits_of(generator, (BATCH, parents.shape[1] + 1))
    rows = first[:, [0, 0, 1, 1, 2, 4]].float()
    tokens = torch.where(torch.arange(6) % 2 == 1, rows.topk(2).indices[..., 1], rows.argmax(-1))
    given = {"member_logits": [first], "draft_tokens": tokens, "parents": parents}
    return given | uniforms_of(generator) | changes


def processed(generator: torch.Generator) -> dict[str, Any]:
    tokens = torch.randint(VOCAB, (BATCH, 12), generator=generator)
    values = torch.randn(BATCH, 12, generator=generator)
    words = torch.randint(-(2**31), 2**31, (BATCH, DRAFT_LEN + 1, VOCAB // 32 + 1), generator=generator)
    processing = sk.Processing(
        logit_bias=(tokens, values),
        repetition_penalty=1.2,
        frequency_penalty=torch.linspace(-0.5, 1.0, BATCH),
        output_tokens=tokens.flip(0),
    )
    return {"processing": processing, "allowed": words.int()}


def cache(generator: torch.Generator, **changes: Any) -> dict[str, Any]:
    caches = [torch.randn(BATCH, 2, 40, 16, generator=generator) for _ in range(4)]
    kept = torch.tensor([0, 2, 5, -1]).repeat(BATCH, 1)
    return {"caches": caches, "kept": kept, "prefix_lens": torch.arange(BATCH) * 3 + 7} | changes


def paged_cache(generator: torch.Generator) -> dict[str, Any]:
    caches = [torch.randn(BATCH * 3, 16, 2, 8, generator=generator) for _ in range(2)]
    return cache(generator, caches=caches, block_table=torch.randperm(BATCH * 3, generator=generator).reshape(BATCH, 3))


def mask(_: torch.Generator, layout: str) -> dict[str, Any]:
    given = {"parents": torch.tensor([[-1, -1, 0, 0, 1, 3]] * BATCH), "prefix_lens": torch.arange(BATCH)}
    return given | {"layout": layout} | ({} if layout in ("packed", "tree") else {"max_prefix": BATCH})


def rows_of(generator: torch.Generator, **changes: Any) -> dict[str, Any]:
    return {"member_logits": [logits_of(generator, (BATCH,))]} | uniforms_of(generator) | changes


def with_processing(make: Make, generator: torch.Generator) -> dict[str, Any]:
    return make(generator) | processed(generator)


def with_filters(make: Make, generator: torch.Generator) -> dict[str, Any]:
    return make(generator) | {"sampling": filters_by_request()}


def cases() -> Iterator[Case]:
    """All of them."""
    mixture, logit_mixture = sk.Mixture((0.4, 0.6)), sk.LogitMixture((0.7, 0.5))
    pair = partial(chain, members=2, draft="member")
    chains: dict[str, Make] = {
        "outside draft": chain,
        "one-hot draft": partial(chain, draft="none"),
        "filters": partial(with_filters, chain),
        "filters, one-hot": partial(with_filters, partial(chain, draft="none")),
        "greedy": partial(chain, sampling=sk.Sampling(temperature=0.0)),
        "log-probabilities": partial(chain, logprobs=True, top_logprobs=3),
        "raw log-probabilities": partial(chain, logprobs="raw", top_logprobs=2),
        "mixture": partial(pair, ensemble=mixture),
        "mixture, filters": partial(with_filters, partial(pair, ensemble=mixture)),
        "logit mixture": partial(pair, ensemble=logit_mixture),
        "contrastive": partial(pair, ensemble=sk.Contrastive(0.5, plausibility=0.1)),
        "processing": partial(with_processing, chain),
        "rule block": partial(chain, rule="block"),
        "rule typical": partial(chain, rule="typical"),
        "rule gumbel": partial(chain, draft="none", rule="gumbel"),
        "rule gumbel, filters": partial(with_filters, partial(chain, draft="none", rule="gumbel")),
        "rule replacement": partial(chain, rule=sk.Replacement(0.5, 2.0)),
        "rule synthetic": partial(chain, rule=sk.Synthetic(0.6)),
        "lengths": partial(chain, draft_lens=torch.tensor([0, 1, 2, 3, 4, 4])),
        "packed rows, slots": packed_chain,
    }
    yield from (Case(f"verify_chain: {name}", "verify_chain", make) for name, make in chains.items())
    outside = partial(tree, siblings="without_replacement", drafter=0)
    for rule in ("token", "traversal"):
        yield Case(f"verify_tree: rule {rule}, drawn", "verify_tree", partial(outside, rule=rule))
    alike = partial(tree, siblings="with_replacement", drafter=0, rule="k_seq")
    yield Case("verify_tree: rule k_seq, drawn", "verify_tree", alike)
    for rule in ("token", "typical", "gumbel"):
        yield Case(f"verify_tree: rule {rule}, chosen", "verify_tree", partial(tree, rule=rule))
    yield Case("verify_tree: filters", "verify_tree", partial(with_filters, tree))
    yield Case("sample", "sample", rows_of)
    yield Case("sample: filters", "sample", partial(with_filters, rows_of))
    yield Case("sample: gumbel, 3 tokens", "sample", partial(rows_of, method="gumbel", count=3))
    yield Case("target_logprobs", "target_logprobs", lambda g: {"member_logits": [logits_of(g, (BATCH, 2))]})
    yield Case("uniforms", "uniforms", uniforms_of)
    yield from (
        Case(f"tree_mask: {layout}", "tree_mask", partial(mask, layout=layout)) for layout in ("full", "packed")
    )
    yield Case("compact_kv", "compact_kv", cache)
    yield Case("compact_kv: paged", "compact_kv", paged_cache)


def mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same with a function applied to all tensors; dataclasses are made anew."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {name: mapped(item, function) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(item, function) for item in value)
    if isinstance(value, sk.Sampling | sk.Processing):
        return type(value)(**{name: mapped(item, function) for name, item in vars(value).items()})
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """In their order."""
    found: list[Tensor] = []
    mapped(value, lambda tensor: found.append(tensor) or tensor)
    return found


def outcome(case: Case, arguments: dict[str, Any], backend: str | None) -> list[Tensor]:
    """What a call gives; for compact_kv, the caches that it has changed."""
    results = getattr(sk, case.operation)(**arguments, backend=backend)
    if case.operation == "compact_kv":
        return [*arguments["caches"], *(value for value in results[:2] if value is not None)]
    return [results] if isinstance(results, Tensor) else [value for value in results if isinstance(value, Tensor)]


def arguments_of(case: Case, seed: int) -> dict[str, Any]:
    """On the CPU."""
    return case.make(torch.Generator().manual_seed(seed))


def expected(case: Case, seed: int) -> list[Tensor]:
    return outcome(case, arguments_of(case, seed), "reference")


def compare(results: list[Tensor], wanted: list[Tensor]) -> None:
    """Raise AssertionError where they differ in more than near ties allow."""
    differ = torch.zeros(len(wanted[0]), dtype=torch.bool)
    own = [result.cpu() for result in results]
    for result, value in zip(own, wanted, strict=True):
        assert (result.shape, result.dtype) == (value.shape, value.dtype)
        if not value.is_floating_point() and len(value) == len(differ):
            differ |= (result != value).reshape(len(value), -1).any(1)
    assert int(differ.sum()) <= NEAR_TIES, f"requests {differ.nonzero()[:, 0].tolist()} differ: {own}, not {wanted}"
    for result, value in zip(own, wanted, strict=True):
        if value.is_floating_point():
            torch.testing.assert_close(result[~differ], value[~differ], **CLOSE, equal_nan=True)


def assert_caches(case: Case, results: list[Tensor], seed: int) -> None:
    """Up to the new lengths; what lies after them is undefined, so the reference's own must be undone there."""
    wanted, count = expected(case, seed), len(arguments_of(case, seed)["caches"])
    assert all(torch.equal(own.cpu(), value) for own, value in zip(results[count:], wanted[count:]))
    if "paged" not in case.name:
        for request, length in enumerate(wanted[count].tolist()):
            for own, value in zip(results[:count], wanted[:count]):
                assert torch.equal(own[request, :, :length].cpu(), value[request, :, :length])


def judge(case: Case, results: list[Tensor], seed: int) -> None:
    if case.operation == "compact_kv":
        assert_caches(case, results, seed)
    else:
        compare(results, expected(case, seed))


def run_eager(case: Case, device: torch.device, backend: str | None, launch_only: bool, calls: int = 3) -> None:
    for seed in range(calls):  # launched, recorded, replayed
        arguments = mapped(arguments_of(case, seed), lambda tensor: tensor.to(device))
        results = outcome(case, arguments, backend)
        if not launch_only:
            judge(case, results, seed)


def run_graph(case: Case, device: torch.device) -> None:
    """Captured once, replayed with the inputs of other seeds."""
    arguments = mapped(arguments_of(case, 0), lambda tensor: tensor.to(device))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        outcome(case, arguments, None)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = outcome(case, arguments, None)
    for seed in (3, 4):
        for own, value in zip(tensors_in(arguments), tensors_in(arguments_of(case, seed)), strict=True):
            own.copy_(value)
        graph.replay()
        judge(case, results, seed)


def by_worth(every: list[Case]) -> list[Case]:
    """One of each operation first, for runs that may end before the last."""
    first = {case.operation: case for case in reversed(every)}
    return [
        *(case for case in every if first[case.operation] is case),
        *(c for c in every if first[c.operation] is not c),
    ]


def check_backends(device: torch.device) -> None:
    """Raise unless a GPU's calls go to Triton."""
    if device.type == "cuda":
        from specens_kernels.backend import READY

        taken = {name: READY.get((name, None, "cuda"), ("none",))[0] for name in SERVED_BY_TRITON}
        assert set(taken.values()) == {"triton"}, f"a GPU's calls go to {taken}: {sk.backends()['triton'].reason}"


def run_case(case: Case, device: torch.device, launch_only: bool, calls: int) -> str | None:
    """What went wrong."""
    try:
        run_eager(case, device, None, launch_only, calls)
        if device.type == "cuda" and case.graph and not launch_only:
            run_graph(case, device)
        if device.type == "cuda":
            torch.cuda.synchronize()
    except Exception:  # noqa: BLE001 -- the other cases are run whatever it is
        return traceback.format_exc(limit=-3)
    return None


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Add one JSON line for each case.")] = None,
    launch_only: Annotated[bool, typer.Option("--launch-only", help="Compare nothing, capture nothing.")] = False,
    calls: Annotated[int, typer.Option(help="Eager calls of a case: launched, recorded, replayed.")] = 3,
    part: Annotated[str, typer.Option(help="i/n: every n-th case from the i-th.")] = "0/1",
    budget: Annotated[float, typer.Option(help="Seconds after which no case is begun.")] = math.inf,
    dependent: Annotated[bool, typer.Option("--dependent", help="By programmatic dependent launches.")] = False,
) -> None:
    """Run the cases; exit with 1 where one fails."""
    begin, device = time.monotonic(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_backends(device)
    index, count = map(int, part.split("/"))
    failures, left_out, out = 0, [], json_path.open("a", encoding="utf-8") if json_path is not None else None
    for case in by_worth(list(cases()))[index::count]:
        started = time.monotonic()
        if started - begin > budget:
            left_out.append(case.name)
            continue
        with dependent_launches(dependent):
            problem = run_case(case, device, launch_only, calls)
        failures += problem is not None
        row = {"case": case.name, "seconds": time.monotonic() - started, "problem": problem}
        print(f"{'FAILED' if problem else 'passed'} {case.name}", problem or "", flush=True)
        if out is not None:
            out.write(json.dumps(row) + "\n")
            out.flush()
    print(f"{failures} failed" + (f"; left out after {budget:.0f} s: {', '.join(left_out)}" if left_out else ""))
    raise SystemExit(failures > 0)


if __name__ == "__main__":
    typer.run(main)
