"""A Llama whose forwards cost what they compute: where models are tiny, transformers' take many times as long."""

from types import NoneType

import torch
import transformers
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu
from transformers import DynamicCache
from transformers.activations import SiLUActivation
from transformers.modeling_outputs import CausalLMOutputWithPast

PLAIN = {torch.nn.Linear, torch.nn.SiLU, SiLUActivation}


class LlamaForCausalLM(transformers.LlamaForCausalLM):
    """As transformers' own, whose name it bears; it reads token ids by itself, and leaves all else to transformers."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, cache=None, use_cache=None, **others):
        rows = others.get("logits_to_keep", 0)
        is_known = others.keys() <= {"logits_to_keep"} and isinstance(rows, int) and self._is_plain()
        is_given = all(each is not None for each in (input_ids, attention_mask, position_ids))
        if not is_given or not is_known or not _sees(attention_mask, cache):
            return super().forward(input_ids, attention_mask, position_ids, cache, use_cache=use_cache, **others)
        mask = attention_mask if attention_mask.dim() == 4 else None
        hidden = self.model.embed_tokens(input_ids)
        angles = position_ids[:, None, :, None].float() * self.model.rotary_emb.inv_freq
        turn = angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)
        for layer in self.model.layers:
            normed = _normed(layer.input_layernorm, hidden)
            hidden = hidden + self._attention(layer.self_attn, normed, turn, mask, cache)
            mlp, normed = layer.mlp, _normed(layer.post_attention_layernorm, hidden)
            gate, up = _project(normed, mlp.gate_proj, mlp.up_proj).chunk(2, dim=-1)
            hidden = hidden + linear(silu(gate) * up, mlp.down_proj.weight)
        logits = self.lm_head(_normed(self.model.norm, hidden[:, -rows:]))
        return CausalLMOutputWithPast(logits=logits, cache=cache)

    def _is_plain(self):
        """Whether the layers are as they were made: no adapter, no hook, nothing but sizes in their configuration."""
        config = self.config
        return (
            config._attn_implementation == "sdpa"
            and config.rope_parameters["rope_type"] == "default"
            and not (config.attention_bias or config.mlp_bias or self.training)
            and all(map(_is_plain, self.model.layers))
        )

    def _attention(self, attention, normed, turn, mask, cache):
        heads, groups = self.config.num_attention_heads, self.config.num_key_value_heads
        projected = _project(normed, attention.q_proj, attention.k_proj, attention.v_proj)
        projected = projected.unflatten(-1, (heads + 2 * groups, -1)).transpose(1, 2)
        (first, second), (cosine, sine) = projected[:, : heads + groups].chunk(2, dim=-1), turn
        turned = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
        query, keys = turned[:, :heads], turned[:, heads:]
        values = projected[:, heads + groups :]
        if cache is not None:
            keys, values = cache.update(keys, values, attention.layer_idx)
        new, seen = query.shape[2], keys.shape[2]
        if mask is None and 1 < new < seen:
            mask = torch.ones(new, seen, dtype=torch.bool).tril(seen - new)
        is_causal = mask is None and new > 1
        mixed = scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=is_causal, enable_gqa=heads != groups
        )
        return linear(mixed.transpose(1, 2).flatten(2), attention.o_proj.weight)


def _sees(mask, cache):
    """Whether a mask says for each slot of the cache who sees it, or else each token sees those before it."""
    if mask.dim() == 4:
        return cache is not None
    return mask.dim() == 2 and type(cache) in (DynamicCache, NoneType) and bool(mask.all())


def _is_plain(layer):
    """Whether nothing was put around or into the parts of a layer."""
    parts = [*layer.self_attn._modules.values(), *layer.mlp._modules.values()]
    return {*map(type, parts)} <= PLAIN and not any(
        part._forward_hooks or part._forward_pre_hooks for part in (layer, layer.self_attn, layer.mlp)
    )


def _normed(norm, hidden):
    return rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _project(hidden, *modules):
    """Several linear layers, side by side."""
    return linear(hidden, torch.cat([module.weight for module in modules]))
