"""Off the CPU the host waits for nothing, so that CUDA graphs record a rank's part: tensors without data show it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from trees_of_decisions import random_decision_tree

from specens_kernels import LogitMixture, Mixture, Processing, Sampling, Synthetic, TokenTree, distributed
from specens_kernels.ops.verify_tree import parents_of_trees

BATCH, SHARD, VOCAB, RANKS = 2, 40, 120, 3
TREE = TokenTree.branching([3, 2])


class Filled(TorchFunctionMode):
    """Refuses tensors off the CPU that are made of the host's numbers: these are copied."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        assert func not in (torch.tensor, torch.as_tensor) or result.is_cpu, (func, args)
        return result


class Recorded(TorchDispatchMode):
    """Refuses copies between host and device, for which a stream that is recorded cannot wait."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [own for own in (*args, result) if isinstance(own, Tensor)]
        copies = func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_)
        assert not copies or len({own.device.type for own in tensors}) == 1, func
        return result


class Ranks:
    """A group that hears as many ranks, whatever they say."""

    def all_gather(self, told: Tensor) -> Tensor:
        return torch.stack([told] * RANKS)


def on_device(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def integers(*shape: int) -> Tensor:
    return on_device(*shape, dtype=torch.int64)


def call(operation: Callable[..., Any], members: int, rows: int, *given: Any, **arguments: Any) -> Any:
    shape = (BATCH, rows, SHARD) if rows > 0 else (BATCH, SHARD)
    logits = [on_device(*shape) for _ in range(members)]
    place = {"vocab_start": SHARD, "vocab_size": VOCAB, "group": Ranks()}
    numbers = (
        {} if operation is distributed.target_logprobs else {"seeds": integers(BATCH), "positions": integers(BATCH)}
    )
    return operation(logits, *given, **place, **numbers, **arguments)


def chain(members: int = 1, **arguments: Any) -> Any:
    return call(distributed.verify_chain, members, 4, integers(BATCH, 3), **arguments)


def tree(parents: Any = TREE, **arguments: Any) -> Any:
    return call(distributed.verify_tree, 1, len(TREE) + 1, integers(BATCH, len(TREE)), parents, **arguments)


def filters() -> dict[str, Any]:
    """Of each request."""
    top_p, min_p = on_device(BATCH, dtype=torch.float32), on_device(BATCH, dtype=torch.float32)
    temperature = on_device(BATCH, dtype=torch.float32)
    own = Sampling(temperature=temperature, top_k=integers(BATCH), top_p=top_p, min_p=min_p)
    return {"sampling": own, "max_top_k": 50}


def edits() -> dict[str, Any]:
    bias = integers(BATCH, 2), on_device(BATCH, 2, dtype=torch.float32)
    own = Processing(logit_bias=bias, prompt_tokens=integers(BATCH, 5), repetition_penalty=1.2)
    return {"processing": own, "allowed": on_device(BATCH, 4, 4, dtype=torch.int32)}


CALLS: dict[str, Callable[[], Any]] = {
    "gumbel": lambda: chain(rule="gumbel"),
    "greedy": lambda: chain(sampling=Sampling(temperature=0.0), logprobs="raw", top_logprobs=2),
    "token": lambda: chain(drafter=0, logprobs=True, top_logprobs=2),
    "filters": lambda: chain(drafter=0, **filters()),
    "processing": lambda: chain(rule="gumbel", **edits()),
    "block, mixture": lambda: chain(2, rule="block", drafter=1, ensemble=Mixture((0.3, 0.7)), **filters()),
    "typical, mixture of logits": lambda: chain(2, rule="typical", ensemble=LogitMixture((1.0, -0.5))),
    "synthetic": lambda: chain(rule=Synthetic(0.7)),
    "decision tree": lambda: chain(rule=random_decision_tree(0, 7), drafter=0),
    "weights of each request": lambda: chain(2, ensemble=Mixture(on_device(BATCH, 2, dtype=torch.float32))),
    "sample": lambda: call(distributed.sample, 1, 0, sampling=Sampling(top_p=0.9, min_p=0.1), logprobs=True),
    "several tokens": lambda: call(distributed.sample, 1, 0, method="gumbel", count=3),
    "scores": lambda: call(distributed.target_logprobs, 2, 4, ensemble=Mixture((0.5, 0.5))),
    "tree": lambda: tree(),
    "tree by gumbel": lambda: tree(rule="gumbel"),
    "drawn children": lambda: tree(drafter=0, siblings="without_replacement", logprobs=True),
    "siblings by k_seq": lambda: tree(rule="k_seq", drafter=0, siblings="with_replacement"),
    "siblings of several drafters by k_seq": lambda: tree(
        integers(BATCH, len(TREE)), rule="k_seq", drafter=integers(BATCH, len(TREE)), siblings="with_replacement"
    ),
    "parents on the device": lambda: tree(integers(BATCH, len(TREE)), drafter=0, siblings="with_replacement"),
}


@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_copied_between_host_and_device_and_no_branch_depends_on_data(name):
    parents_of_trees(TREE, integers(BATCH, len(TREE)))  # from the first call on they are kept on the device
    with Recorded(), Filled():
        result = CALLS[name]()
    tensors = [own for own in (result if isinstance(result, tuple) else (result,)) if own is not None]
    assert {own.device.type for own in tensors} == {"meta"}
