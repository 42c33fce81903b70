"""`out=` of every operation: the caller's buffers hold what a call without them returns, and nothing is allocated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specens_kernels import (
    Sampling,
    Workspace,
    compact_kv,
    sample,
    target_logprobs,
    tree_mask,
    uniforms,
    verify_chain,
    verify_tree,
)

GENERATOR = torch.Generator().manual_seed(0)
LOGITS = torch.randn(3, 4, 33, generator=GENERATOR)
TOKENS = torch.tensor([[3, 4, 5], [3, 9, 1], [0, 2, 7]])
SEEDS, POSITIONS, STEPS = torch.arange(3), torch.arange(5, 8), torch.arange(2, 5)
PARENTS, LENGTHS = torch.tensor([[-1, 0, 0], [-1, -1, 1], [-1, 0, 1]]), torch.tensor([2, 0, 4])
CACHE = torch.randn(6, 2, 3, 4, generator=GENERATOR)  # [blocks, block_size, heads, dim]
BLOCKS, KEPT = torch.tensor([[0, 1], [2, 3], [4, 5]]), torch.tensor([[0, 2], [1, -1], [-1, -1]])
RANDOM = {"seeds": SEEDS, "positions": POSITIONS}
SOFT = Sampling(temperature=0.7, top_p=0.9)

# of each operation: the function, and its arguments by name
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "verify_chain": (verify_chain, {"member_logits": LOGITS, "draft_tokens": TOKENS, "top_logprobs": 2, **RANDOM}),
    "verify_tree": (
        verify_tree,
        {"member_logits": LOGITS, "draft_tokens": TOKENS, "parents": PARENTS, "top_logprobs": 2, **RANDOM},
    ),
    "verify_tree, 2 levels": (
        verify_tree,
        {"member_logits": LOGITS, "draft_tokens": TOKENS, "parents": PARENTS, "max_levels": 2, **RANDOM},
    ),
    "sample": (sample, {"member_logits": LOGITS[:, 0], "sampling": SOFT, "logprobs": True, **RANDOM}),
    "sample, best": (sample, {"member_logits": LOGITS[:, 0], "method": "gumbel", "top_logprobs": 2, **RANDOM}),
    "sample, several": (sample, {"member_logits": LOGITS[:, 0], "method": "gumbel", "count": 2, **RANDOM}),
    "target_logprobs": (target_logprobs, {"member_logits": LOGITS, "sampling": SOFT}),
    "target_logprobs, one step": (target_logprobs, {"member_logits": LOGITS[:, 0]}),
    "uniforms": (uniforms, {"seeds": SEEDS, "positions": POSITIONS, "step": STEPS}),
    "tree_mask": (tree_mask, {"parents": PARENTS, "prefix_lens": LENGTHS, "max_prefix": 4}),
    "tree_mask, packed": (tree_mask, {"parents": PARENTS, "prefix_lens": LENGTHS, "layout": "packed"}),
    "tree_mask, additive": (
        tree_mask,
        {"parents": PARENTS, "prefix_lens": LENGTHS, "layout": "additive", "max_prefix": 4, "dtype": torch.bfloat16},
    ),
    "compact_kv": (compact_kv, {"caches": CACHE, "kept": KEPT, "prefix_lens": LENGTHS.clamp(max=2)}),
}
CALLS["compact_kv, paged"] = (compact_kv, CALLS["compact_kv"][1] | {"block_table": BLOCKS})
CALLS["compact_kv"][1].update(caches=CACHE.transpose(0, 2)[:3].contiguous(), slot_dim=-2)
NAMES = pytest.mark.parametrize("name", CALLS)


def call_of(name: str, device: str = "cpu", **more: Any) -> Any:
    function, arguments = CALLS[name]
    own = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in arguments.items()}
    if function is compact_kv:
        own["caches"] = own["caches"].clone()  # it is written to
    return function(**own, **more)


def tensors_of(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [value for value in result if value is not None]


def like(result: Any, fill: Callable[[Tensor], Tensor] = lambda value: torch.full_like(value, 1)) -> Any:
    """The same with other tensors."""
    if isinstance(result, Tensor):
        return fill(result)
    return type(result)(*(None if value is None else fill(value) for value in result))


@NAMES
def test_buffers_hold_what_a_call_without_them_returns(name, backend, device):
    expected = call_of(name, device, backend=backend)
    out = like(expected)
    result = call_of(name, device, backend=backend, out=out)
    assert result is out or all(own is given for own, given in zip(result, out, strict=True))
    assert all(torch.equal(own, value) for own, value in zip(tensors_of(out), tensors_of(expected), strict=True))


@NAMES
def test_nothing_is_allocated(name):
    function, arguments = CALLS[name]
    out = like(call_of(name))

    def allocated(**more: Any) -> int:
        with torch.profiler.profile(profile_memory=True) as profile:
            function(**arguments, backend="cpp", **more)
        return sum(max(0, event.self_cpu_memory_usage) for event in profile.key_averages())

    assert allocated(out=out) == 0
    assert allocated() > 0  # the profiler would see it


@pytest.mark.parametrize("backend", ["reference", "cpp"])
@NAMES
def test_a_buffer_that_does_not_fit_is_refused_by_name(name, backend):
    result = call_of(name)
    fields = [""] if isinstance(result, Tensor) else [own for own in result._fields if getattr(result, own) is not None]
    for field in fields:
        own = getattr(result, field) if field else result
        apart = torch.empty((*own.shape, 2), dtype=own.dtype)[..., 0]
        for wrong in (own.to(torch.float16), own[:1].clone(), apart, own.to("meta")):
            out = result._replace(**{field: wrong}) if field else wrong
            with pytest.raises(ValueError, match=rf"^out{'.' if field else ''}{field}: expected .*got"):
                call_of(name, backend=backend, out=out)
    with pytest.raises(ValueError, match=r"^out: expected a .*, got str"):
        call_of(name, backend=backend, out="out")


@pytest.mark.parametrize("backend", ["reference", "cpp"])
@NAMES
def test_a_buffer_that_shares_memory_with_an_argument_or_another_is_refused_by_name(name, backend):
    function, arguments = CALLS[name]
    result = like(call_of(name), lambda value: torch.zeros_like(value))
    memory = torch.zeros(4096, dtype=torch.int64)
    first = tensors_of(result)[0]
    shared = memory.view(first.dtype).as_strided(first.shape, first.contiguous().stride())
    if first.dtype == torch.bool:
        shared = memory.view(torch.uint8).view(torch.bool).as_strided(first.shape, first.stride())
    argument = next(key for key, value in arguments.items() if isinstance(value, Tensor))
    own = arguments[argument]
    overlaid = memory.view(own.dtype).as_strided(own.shape, own.contiguous().stride()).copy_(own)
    out = shared if isinstance(result, Tensor) else result._replace(**{result._fields[0]: shared})
    with pytest.raises(ValueError, match=rf"^out.*: expected memory of its own.*{argument}"):
        function(**arguments | {argument: overlaid}, backend=backend, out=out)
    if not isinstance(result, Tensor) and hasattr(result, "num_tokens"):
        with pytest.raises(ValueError, match=r"^out.num_tokens: expected memory of its own.*out.num_accepted"):
            call_of(name, backend=backend, out=result._replace(num_tokens=result.num_accepted))


@NAMES
def test_a_workspace_is_taken_where_kernels_run_and_refused_elsewhere_by_name(name):
    out, workspace = like(call_of(name)), Workspace()
    call_of(name, backend="cpp", out=out, workspace=workspace)
    assert all(torch.equal(*pair) for pair in zip(tensors_of(out), tensors_of(call_of(name)), strict=True))
    with pytest.raises(ValueError, match=r"^workspace: expected None with the backend 'reference'.*, got a Workspace"):
        call_of(name, backend="reference", workspace=workspace)
    with pytest.raises(ValueError, match=r"^workspace: expected a Workspace, got str"):
        call_of(name, workspace="memory")


def test_a_workspace_that_another_thread_is_in_is_refused():
    workspace = Workspace()
    with pytest.raises(ValueError, match=r"^workspace: expected one that no other thread is in, got one in use"):
        workspace.run(lambda: call_of("sample", backend="cpp", workspace=workspace))
    call_of("sample", backend="cpp", workspace=workspace)


def test_buffers_are_written_in_a_traced_graph():
    names = [name for name in CALLS if not name.startswith("compact")]
    outs = [like(call_of(name)) for name in names]

    def step(outs: list[Any]) -> list[Tensor]:
        for name, out in zip(names, outs, strict=True):
            function, arguments = CALLS[name]
            function(**arguments, backend="cpp", out=out)
        return [tensors_of(out)[0] + 0 for out in outs]

    firsts = torch.compile(step, fullgraph=True, backend="aot_eager")(outs)
    for name, first, out in zip(names, firsts, outs, strict=True):
        expected = tensors_of(call_of(name))
        assert torch.equal(first, expected[0])
        assert all(torch.equal(own, value) for own, value in zip(tensors_of(out), expected, strict=True)), name
