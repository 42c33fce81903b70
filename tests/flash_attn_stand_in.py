"""flash_attn_with_kvcache in plain PyTorch: flash-attn's signature, what it refuses, what it returns for no keys."""

from __future__ import annotations

import inspect

import torch

DTYPES = (torch.float16, torch.bfloat16)


class StandIn:
    """A module `flash_attn` that records the arguments of its calls, by name."""

    def __init__(self):
        self.calls = []

    def flash_attn_with_kvcache(
        self,
        q,
        k_cache,
        v_cache,
        k=None,
        v=None,
        rotary_cos=None,
        rotary_sin=None,
        cache_seqlens=None,
        cache_batch_idx=None,
        cache_leftpad=None,
        block_table=None,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        rotary_interleaved=True,
        alibi_slopes=None,
        num_splits=0,
        return_softmax_lse=False,
    ):
        arguments = {name: value for name, value in locals().items() if name != "self"}
        self.calls.append(arguments)
        defaults = inspect.signature(StandIn.flash_attn_with_kvcache).parameters
        for name in ("k", "v", "rotary_cos", "rotary_sin", "block_table", "alibi_slopes", "softcap", "window_size"):
            assert arguments[name] == defaults[name].default, f"the stand-in knows no {name}"
        assert not causal
        batch, _, heads, dim = q.shape
        assert {q.dtype} == {k_cache.dtype} == {v_cache.dtype}
        assert q.dtype in DTYPES
        assert k_cache.shape == v_cache.shape
        assert k_cache.shape[3] == dim <= 256
        assert dim % 8 == 0
        assert heads % k_cache.shape[2] == 0
        assert k_cache.stride(-1) == v_cache.stride(-1) == 1
        if cache_batch_idx is None:
            assert k_cache.shape[0] == batch
            cache_batch_idx = torch.arange(batch, dtype=torch.int32, device=q.device)
        if cache_leftpad is None:
            cache_leftpad = torch.zeros_like(cache_seqlens)
        for tensor in (cache_seqlens, cache_batch_idx, cache_leftpad):
            assert tensor.dtype == torch.int32
            assert tensor.is_contiguous()
            assert tensor.shape == (batch,)
        output, log_sum_exp = attend(q, k_cache, v_cache, cache_batch_idx, cache_leftpad, cache_seqlens, softmax_scale)
        return (output, log_sum_exp) if return_softmax_lse else output


def attend(query, key, value, request, first, last, scale):
    """Without a key, the output is 0 and the log-sum-exp +inf, as flash-attn has it."""
    output = torch.zeros_like(query)
    log_sum_exp = torch.full((query.shape[0], query.shape[2], query.shape[1]), torch.inf, device=query.device)
    group = query.shape[2] // key.shape[2]
    for index, (start, stop) in enumerate(zip(first.tolist(), last.tolist(), strict=True)):
        if start >= stop:
            continue
        keys, values = (cache[request[index], start:stop].float().transpose(0, 1) for cache in (key, value))
        rows = query[index].float().transpose(0, 1)  # [heads, rows, dim]
        scores = rows @ keys.repeat_interleave(group, 0).mT * scale
        output[index] = (scores.softmax(-1) @ values.repeat_interleave(group, 0)).transpose(0, 1).to(query.dtype)
        log_sum_exp[index] = scores.logsumexp(-1)
    return output, log_sum_exp
