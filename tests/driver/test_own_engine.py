"""The example of an engine of one's own: every schedule and drafter runs on it as on transformers."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from driver.tiny_models import Bigram
from specens import SpeculativeEnsemble
from specens.drafters import DraftModel, Heads, LayerSkip, PromptLookup
from specens.engines.protocol import Forward

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


def test_a_forward_without_texts_is_nobodys(monkeypatch):
    ensemble = SpeculativeEnsemble([OWN.NetworkEngine(0)], schedule="standard")
    expected = ensemble.generate(PROMPT, max_new_tokens=4, seed=1)
    monkeypatch.setattr(OWN.NetworkContext, "forwards", [Forward([], [], 0.1)])
    told = ensemble.generate(PROMPT, max_new_tokens=4, seed=1)
    assert told.tokens == expected.tokens
    assert told.statistics.forwards == [0]


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


CONTEXT, ENGINE = OWN.NetworkContext, OWN.NetworkEngine
READ = CONTEXT._read
MISTAKES = {  # who makes it, in which attribute, what stands in its place, and what is said of it
    "no vocabulary": (
        ENGINE,
        "vocab_size",
        None,
        r"members: expected an engine with an integer vocab_size, got <own_e",
    ),
    "a length": (ENGINE, "max_length", "8", r"members: expected an engine with an integer max_length or None"),
    "an end": (ENGINE, "end_tokens", [3], r"members: expected an engine with a set of ids as end_tokens"),
    "no context": (ENGINE, "open", None, r"open: expected a Context from NetworkEngine, got None"),
    "no text": (CONTEXT, "add", None, r"add: expected a Text from NetworkContext, got None"),
    "nothing": (CONTEXT, "read", None, r"read: expected a list of tensors .* from NetworkContext, got NoneType"),
    "numbers": (CONTEXT, "read", [[1.0]], r"read: expected a list of tensors .*, got list of \['list'\]"),
    "too many texts": (
        CONTEXT,
        "read",
        [torch.zeros(1, 50)] * 2,
        r"expected \[1\] rows .*, got \[\[1, 50\], \[1, 50\]\]",
    ),
    "too many rows": (CONTEXT, "_read", torch.zeros(2, 50), r"read: expected \[1\] rows .*Context, got \[\[2, 50\]\]"),
    "a vector": (
        CONTEXT,
        "_read",
        torch.zeros(50),
        r"read: expected \[1\] rows of logits \[rows, vocab\] .* \[\[50\]\]",
    ),
    "a batch": (CONTEXT, "_read", torch.zeros(1, 1, 50), r"read: expected \[1\] rows .* \[\[1, 1, 50\]\]"),
    "an empty row": (CONTEXT, "_read", torch.zeros(1, 0), r"read: expected \[1\] rows .* \[\[1, 0\]\]"),
    "integers": (CONTEXT, "_read", torch.zeros(1, 50).long(), r"logits in float32, bfloat16 or float16 .* torch.int64"),
    "doubles": (
        CONTEXT,
        "_read",
        torch.zeros(1, 50).double(),
        r"logits in float32, bfloat16 or float16 .* torch.float64",
    ),
    "strides": (
        CONTEXT,
        "_read",
        torch.zeros(1, 100)[:, ::2],
        r"read: expected logits with a contiguous .* a stride of 2",
    ),
    "states": (CONTEXT, "hidden", [torch.zeros(50)], r"hidden: expected \[1\] rows of hidden states .* \[\[50\]\]"),
    "forwards": (
        CONTEXT,
        "forwards",
        lambda: [Forward([1, 2], [3], 0.0)],
        r"num_tokens: expected one for each of 2 texts",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_mistakes_of_an_engine_are_named(monkeypatch, mistake):
    owner, name, given, expected = mistake
    is_method = callable(getattr(owner, name))
    monkeypatch.setattr(
        owner, name, (lambda *_: given) if is_method else property(lambda _: given()) if callable(given) else given
    )
    with pytest.raises(ValueError, match=expected):
        SpeculativeEnsemble([ENGINE(0)], schedule="standard").generate(PROMPT)


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda rows: rows.to("meta"), "torch.float32 on meta of 50 tokens"),
        (lambda rows: rows.half(), "torch.float16 on cpu of 50 tokens"),
        (lambda rows: rows[:, :49], "torch.float32 on cpu of 49 tokens"),
    ],
    ids=["device", "dtype", "vocabulary"],
)
def test_logits_are_of_one_kind_in_all_reads(monkeypatch, change, got):
    reads = []

    def read(context, own, text):
        reads.append(own)
        rows = READ(context, own, text)
        return rows if len(reads) < 3 else change(rows)

    monkeypatch.setattr(CONTEXT, "_read", read)
    expected = f"read: expected logits of one kind, torch.float32 on cpu of 50 tokens, from NetworkContext, got {got}"
    with pytest.raises(ValueError, match=expected):
        SpeculativeEnsemble([ENGINE(0)], schedule="standard").generate(PROMPT, max_new_tokens=5)
    assert len(reads) == 3


def test_the_engine_of_a_draft_model_is_checked_too():
    engine = ENGINE(0)
    engine.vocab_size = 50.0
    with pytest.raises(ValueError, match=r"model: expected an engine with an integer vocab_size, got .* with 50.0"):
        DraftModel(engine)
