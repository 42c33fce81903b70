"""Attention of draft trees by flash-attn, which a stand-in of its signature serves here."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from attention_cases import DTYPES, assert_near, operands, random_call, random_problem
from flash_attn_stand_in import StandIn

from specens_kernels import tree_attention
from specens_kernels.ops.tree_attention import flash

PROBLEM = random_problem(0)
QUERY, KEY = PROBLEM["query"], PROBLEM["key"]


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_flash_attn_for_the_prefix_gives_the_result_of_the_reference(monkeypatch, dtype):
    """By flash-attn itself where it is installed and there is a GPU."""
    device, stand_in = "cuda", StandIn()
    if flash.REASON is not None:
        device = "cpu"
        monkeypatch.setitem(sys.modules, "flash_attn", stand_in)
    num_empty = 0
    for seed in range(60):
        problem, options, expected = random_call(seed, dtype)
        arguments = operands(problem, **options)
        on_device = (value.to(device) if isinstance(value, torch.Tensor) else value for value in arguments)
        assert_near(flash.tree_attention(*on_device).cpu(), expected)
        num_empty += int((problem["prefix_lens"] == 0).sum())
    assert len(stand_in.calls) == (60 if device == "cpu" else 0)
    assert num_empty >= 5


@pytest.mark.parametrize("window", [None, 3])
def test_flash_attn_reads_the_cache_where_it_lies(monkeypatch, window):
    stand_in = StandIn()
    monkeypatch.setitem(sys.modules, "flash_attn", stand_in)
    problem = random_problem(0, dtype=torch.bfloat16)
    flash.tree_attention(*operands(problem, window=window, scale=0.5))
    (call,) = stand_in.calls
    for name in ("key", "value"):
        cache = call[f"{name[0]}_cache"]
        assert cache.data_ptr() == problem[name].data_ptr()
        assert cache.shape == problem[name].transpose(1, 2).shape
    assert call["softmax_scale"] == 0.5
    assert call["return_softmax_lse"] is True
    nodes = 1 if window is None else 9
    assert call["cache_seqlens"].tolist() == problem["prefix_lens"].repeat_interleave(nodes).tolist()


def test_a_node_without_a_prefix_in_sight_takes_nothing_from_flash_attn(monkeypatch):
    """Whatever flash-attn writes for rows without a key."""

    class Careless(StandIn):
        def flash_attn_with_kvcache(self, *arguments, **named):
            output, log_sum_exp = super().flash_attn_with_kvcache(*arguments, **named)
            nothing = log_sum_exp.isinf()
            return output.masked_fill(nothing.transpose(1, 2)[..., None], torch.nan), log_sum_exp

    monkeypatch.setitem(sys.modules, "flash_attn", Careless())
    problem = random_problem(0, dtype=torch.float16)
    problem["prefix_lens"] = torch.tensor([0, 5, 0])
    for window in (None, 2):
        result = flash.tree_attention(*operands(problem, window=window, scale=0.5))
        assert_near(result, tree_attention(**problem, window=window, scale=0.5, backend="reference"))


def test_flash_attn_asked_for_by_name_runs_or_says_why_not(monkeypatch):
    with pytest.raises(RuntimeError, match="backend 'flash' cannot run here: flash-attn "):
        tree_attention(**PROBLEM, backend="flash")
    monkeypatch.setattr(flash, "REASON", None)
    with pytest.raises(RuntimeError, match=r"wants a CUDA device of compute capability 8.0 or more, not cpu"):
        tree_attention(**PROBLEM, backend="flash")


def test_flash_attn_says_what_it_does_not_take(monkeypatch):
    class OnGpu(torch.Tensor):
        device = torch.device("cuda", 0)

    def reason(query, key=KEY):
        return flash.unsuited(query.as_subclass(OnGpu), key, key)

    monkeypatch.setattr(flash, "REASON", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert reason(QUERY.half()) is None
    assert "not torch.float32" in reason(QUERY)
    assert "not 5" in reason(QUERY[..., :5].half())
    assert "not 264" in reason(QUERY.half().repeat(1, 1, 1, 33))
    assert "contiguous" in reason(QUERY.half(), KEY.mT.contiguous().mT)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert "8.0" in reason(QUERY.half())


def test_a_flash_attn_that_cannot_be_used_is_left_alone(monkeypatch):
    """Not installed; version 4, which shares the name; version 2."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for module, reason in ((None, "cannot be imported"), (SimpleNamespace(), "flash_attn_with_kvcache")):
        monkeypatch.setitem(sys.modules, "flash_attn", module)
        assert reason in flash._import()
    monkeypatch.setitem(sys.modules, "flash_attn", StandIn())
    assert flash._import() is None
