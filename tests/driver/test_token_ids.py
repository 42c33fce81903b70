"""What members and processors read of a text costs by what is new in it, not by its length."""

from __future__ import annotations

import pytest
import torch
from driver.tiny_models import relative_of, tiny_llama
from hypothesis import given
from hypothesis import strategies as st
from specens import SpeculativeEnsemble
from specens.engines.token_ids import TokenIds

from specens_kernels import Sampling

TEXTS = st.lists(st.integers(0, 60), max_size=9)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=5), TEXTS, st.data())
def test_ids_are_those_of_the_whole_text_whatever_was_rejected(prompt, sequence, data):
    ids = TokenIds(prompt, torch.device("cpu"))
    for _ in range(4):
        assert ids.after(sequence).tolist() == [prompt + sequence]
        kept = data.draw(st.integers(0, len(sequence)))
        ids.forget(kept)
        sequence = sequence[:kept] + data.draw(TEXTS)


def shifted(ids, logits):
    return logits.roll(int(ids[0, -1]) % 3, dims=-1)


@pytest.mark.parametrize(
    ("how", "settings"),
    [
        ({"schedule": "standard"}, {}),
        ({"schedule": "fixed", "draft_lens": 3}, {"logits_processors": [shifted]}),
        ({"schedule": "alternate"}, {}),
        ({"tree": (2, 1)}, {}),
    ],
    ids=["standard", "fixed with processors", "alternate", "tree"],
)
def test_no_round_turns_the_whole_text_into_a_tensor(how, settings, monkeypatch):
    first = tiny_llama(0)
    ensemble = SpeculativeEnsemble([first, relative_of(first, 1)], **how)
    prompt, made, make = [5, 3, 8, 1] * 100, [], torch.tensor

    def counted(data, *arguments, **keywords):
        tensor = make(data, *arguments, **keywords)
        made.append(tensor.numel())
        return tensor

    monkeypatch.setattr(torch, "tensor", counted)
    ensemble.generate(prompt, max_new_tokens=24, sampling=Sampling(temperature=0.0), **settings)
    assert len([size for size in made if size >= len(prompt)]) <= 2 * (1 + bool(settings))
    assert sum(made) > 24
