"""The example of an engine of one's own: every schedule and drafter runs on it as on transformers."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from driver.tiny_models import Bigram
from specens import SpeculativeEnsemble
from specens.drafters import DraftModel, Heads, LayerSkip, PromptLookup

from specens_kernels import Sampling

GREEDY = Sampling(temperature=0.0)
PROMPT = [1, 2, 3, 1, 2]


def example():
    path = Path(__file__).parents[2] / "examples" / "own_engine.py"
    spec = importlib.util.spec_from_file_location("own_engine", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["own_engine"] = module
    spec.loader.exec_module(module)
    return module


OWN = example()
WAYS = {
    "fixed": {"schedule": "fixed", "draft_lens": 3},
    "alternate": {"schedule": "alternate", "draft_lens": 2},
    "tree": {"tree": (3, 2)},
    "lookup": {"drafter": PromptLookup()},
    "lookup in trees": {"drafter": PromptLookup(), "tree": (2, 2)},
    "draft model": {"drafter": DraftModel(OWN.NetworkEngine(2)), "draft_lens": 3},
}


def test_the_example_is_as_short_as_the_protocol_promises():
    lines = [line for line in Path(OWN.__file__).read_text().splitlines() if line.strip()]
    assert len(lines) <= 80


@pytest.mark.parametrize("held", [True, False], ids=["holds trees", "path by path"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_every_way_writes_the_texts_of_standard_alone_and_in_a_batch(monkeypatch, way, held):
    monkeypatch.setattr(OWN.NetworkContext, "holds_tree", lambda *_: held)
    members = [OWN.NetworkEngine(seed) for seed in (0, 1)]
    job = {"max_new_tokens": 15, "sampling": GREEDY}
    expected = SpeculativeEnsemble(members, schedule="standard").generate(PROMPT, **job)
    ensemble = SpeculativeEnsemble(members, **way)
    assert ensemble.generate(PROMPT, **job).tokens == expected.tokens
    texts = sorted(ensemble.generate_many([PROMPT, [4], PROMPT], batch_size=2, **job), key=lambda text: text.index)
    assert texts[0].tokens == texts[2].tokens == expected.tokens
    assert sum(texts[0].statistics.forwards) > 0
    seeded = {"max_new_tokens": 15, "seed": 5}
    standard = SpeculativeEnsemble(members, schedule="standard", rule="gumbel").generate(PROMPT, **seeded)
    assert SpeculativeEnsemble(members, **way, rule="gumbel").generate(PROMPT, **seeded).tokens == standard.tokens


def test_forwards_and_tokens_are_counted_though_the_engine_counts_nothing():
    members = [OWN.NetworkEngine(seed) for seed in (0, 1)]
    statistics = SpeculativeEnsemble(members, schedule="standard").generate(PROMPT, max_new_tokens=4).statistics
    assert statistics.forwards == [4, 4]
    assert statistics.tokens_fed == [len(PROMPT) + 3] * 2
    assert 0 < sum(statistics.forward_seconds) < statistics.seconds


def test_members_of_two_engines_make_one_ensemble():
    members = [OWN.NetworkEngine(0), Bigram(torch.randn(50, 50, generator=torch.Generator().manual_seed(0)))]
    job = {"max_new_tokens": 12, "sampling": GREEDY}
    expected = SpeculativeEnsemble(members, schedule="standard").generate(PROMPT, **job).tokens
    for way in ({"schedule": "alternate"}, {"tree": (2, 2)}):
        assert SpeculativeEnsemble(members, **way).generate(PROMPT, **job).tokens == expected


def test_what_an_engine_cannot_do_is_refused():
    with pytest.raises(ValueError, match="prompt: expected ids < 50 for member 0, got 60"):
        SpeculativeEnsemble([OWN.NetworkEngine(0)], schedule="standard").generate([60])
    with pytest.raises(ValueError, match="heads: expected a member with an output layer, got NetworkEngine"):
        SpeculativeEnsemble([OWN.NetworkEngine(0)], drafter=Heads(lambda states: states))
    with pytest.raises(ValueError, match="drafter: expected a member of transformers, got NetworkEngine"):
        SpeculativeEnsemble([OWN.NetworkEngine(0)], drafter=LayerSkip(exit_layer=1))


def test_mistakes_of_an_engine_are_named(monkeypatch):
    engine = OWN.NetworkEngine(0)
    monkeypatch.setattr(OWN.NetworkEngine, "vocab_size", None)
    with pytest.raises(ValueError, match=r"members: expected an engine with an integer vocab_size, got <own_engine"):
        SpeculativeEnsemble([engine], schedule="standard")
    monkeypatch.undo()
    monkeypatch.setattr(OWN.NetworkContext, "_read", lambda *_: torch.zeros(2, 50))
    expected = r"read: expected \[1\] rows of logits \[rows, vocab\] from NetworkContext, got \[\[2, 50\]\]"
    with pytest.raises(ValueError, match=expected):
        SpeculativeEnsemble([engine], schedule="standard").generate(PROMPT)
