"""The quick Llama of these tests against transformers' own."""

import pytest
import torch
import transformers
from driver.lean_llama import LlamaForCausalLM
from driver.tiny_models import tiny_llama
from transformers import DynamicCache


@pytest.fixture
def calls(monkeypatch):
    """A number for each forward that transformers makes."""
    forward, made = transformers.LlamaForCausalLM.forward, []

    def counted(*arguments, **settings):
        made.append(len(made))
        return forward(*arguments, **settings)

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", counted)
    return made


@torch.inference_mode()
def logits_of(model, rows, **settings):
    """Those of a prompt, of one token after it, of several, of two siblings after those, and of a text at once."""
    ids = torch.arange(24).view(2, 12) % 61
    cache, found = DynamicCache(config=model.config), []
    siblings = torch.zeros(2, 1, 2, 12)
    siblings[:, :, 0, 11] = siblings[:, :, 1, 10] = float("-inf")
    for start, end in ((0, 4), (4, 5), (5, 10), (10, 12)):
        places = torch.arange(start, end) if end < 12 else torch.tensor([10, 10])
        mask = torch.ones(2, end, dtype=torch.long) if end < 12 else siblings
        given = {"attention_mask": mask, "position_ids": places.expand(2, -1), "cache": cache, "use_cache": True}
        found.append(model(input_ids=ids[:, start:end], **given, **settings).logits)
    given = {"attention_mask": torch.ones_like(ids), "position_ids": torch.arange(12).expand(2, -1)}
    found.append(model(input_ids=ids, use_cache=False, **given, logits_to_keep=rows, **settings).logits)
    return found


@pytest.mark.parametrize("groups", [2, 4])
def test_it_has_the_logits_of_transformers(groups, calls):
    model = tiny_llama(0, num_key_value_heads=groups)
    plain = transformers.LlamaForCausalLM(model.config).eval()
    plain.load_state_dict(model.state_dict())
    expected = logits_of(plain, 3)
    assert len(calls) == 5
    torch.testing.assert_close(logits_of(model, 3), expected, rtol=1e-5, atol=1e-5)
    assert len(calls) == 5


def test_what_it_does_not_know_is_read_by_transformers(calls):
    model = tiny_llama(0)
    assert isinstance(model, LlamaForCausalLM)
    hook = model.model.layers[0].register_forward_hook(lambda _, __, output: 0.5 * output)
    hooked = logits_of(model, 3)
    assert len(calls) == 5
    hook.remove()
    assert not torch.allclose(logits_of(model, 3)[0], hooked[0])
    assert len(calls) == 5
    padded = torch.tensor([[0, 1, 1], [1, 1, 1]])
    model(input_ids=torch.ones_like(padded), attention_mask=padded, position_ids=padded, use_cache=False)
    logits_of(model, 3, output_hidden_states=True)
    assert len(calls) == 11
