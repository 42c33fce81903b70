"""Logits processors of transformers and of users: each writes the text of `model.generate`, or is refused by name."""

import inspect
import itertools

import pytest
import torch
import transformers
from driver.tiny_models import relative_of, tiny_llama
from specens import SpeculativeEnsemble
from specens.drafters import PromptLookup
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from specens_kernels import Mixture, Sampling

VOCAB, LENGTH = 61, 12
GREEDY = Sampling(temperature=0.0)
PROMPT = [5, 3, 8, 5, 3, 9, 5, 3]
ALL = {
    name: kind
    for name, kind in vars(logits_process).items()
    if inspect.isclass(kind)
    and issubclass(kind, logits_process.LogitsProcessor)
    and kind.__call__ is not logits_process.LogitsProcessor.__call__
}
NO_EFFECT_ON_GREEDY = {
    *("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "TopHLogitsWarper", "MinPLogitsWarper"),
    *("EpsilonLogitsWarper", "EtaLogitsWarper", "LogitNormalization", "InfNanRemoveLogitsProcessor"),
}
WHISPER = transformers.GenerationConfig(
    no_timestamps_token_id=40, eos_token_id=7, bos_token_id=6, max_initial_timestamp_index=3
)
ONE = [5]  # where what is forced comes right after a prompt of one token
IN = {  # the arguments of each, and the prompt
    "MinLengthLogitsProcessor": ((14, 10), PROMPT),
    "MinNewTokensLengthLogitsProcessor": ((len(PROMPT), 9, 10), PROMPT),
    "TemperatureLogitsWarper": ((0.7,), PROMPT),
    "RepetitionPenaltyLogitsProcessor": ((1.8,), PROMPT),
    "EncoderRepetitionPenaltyLogitsProcessor": ((9.0, torch.tensor([PROMPT])), PROMPT),
    "TopPLogitsWarper": ((0.5,), PROMPT),
    "TopKLogitsWarper": ((4,), PROMPT),
    "TopHLogitsWarper": ((0.4,), PROMPT),
    "MinPLogitsWarper": ((0.2,), PROMPT),
    "TypicalLogitsWarper": ((0.2,), PROMPT),
    "EpsilonLogitsWarper": ((3e-3,), PROMPT),
    "EtaLogitsWarper": ((3e-3,), PROMPT),
    "NoRepeatNGramLogitsProcessor": ((1,), PROMPT),
    "EncoderNoRepeatNGramLogitsProcessor": ((1, torch.arange(0, VOCAB, 2)[None]), PROMPT),
    "SequenceBiasLogitsProcessor": (([[[11], 15.0], [[3, 12], 30.0], [[11, 20], 40.0]],), PROMPT),
    "NoBadWordsLogitsProcessor": (([[token] for token in range(1, VOCAB, 3)] + [[10, 11]],), PROMPT),
    "PrefixConstrainedLogitsProcessor": (
        (lambda _, ids: [(int(ids[-1]) * 7 + 1) % VOCAB, len(ids) % VOCAB], 1),
        PROMPT,
    ),
    "ForcedBOSTokenLogitsProcessor": ((44,), ONE),
    "ForcedEOSTokenLogitsProcessor": ((len(PROMPT) + 10, 37), PROMPT),
    "InfNanRemoveLogitsProcessor": ((), PROMPT),
    "ExponentialDecayLengthPenalty": (((3, 1.8), 37, len(PROMPT)), PROMPT),
    "LogitNormalization": ((), PROMPT),
    "SuppressTokensAtBeginLogitsProcessor": ((list(range(50)), len(PROMPT)), PROMPT),
    "SuppressTokensLogitsProcessor": ((list(range(0, 60, 2)),), PROMPT),
    "WhisperTimeStampLogitsProcessor": ((WHISPER, len(PROMPT)), PROMPT),
    "AlternatingCodebooksLogitsProcessor": ((len(PROMPT), 21, 20), PROMPT),
    "BarkEosPrioritizerLogitsProcessor": ((37, 1e-4), PROMPT),
    "WatermarkLogitsProcessor": ((VOCAB, "cpu", 0.25, 20.0), PROMPT),
}
OUT = sorted(set(ALL) - set(IN))


@pytest.fixture(scope="module")
def model():
    return tiny_llama(0)


def ensembles(model):
    twin = relative_of(model, 1)
    return {
        "standard": SpeculativeEnsemble([model], schedule="standard"),
        "fixed": SpeculativeEnsemble([model, twin], None, Mixture((1, 0)), 3, "fixed", drafter=1),
        "alternate": SpeculativeEnsemble([model, twin], None, Mixture((1, 0)), 2),
        "lookup": SpeculativeEnsemble([model], None, None, 4, "fixed", drafter=PromptLookup()),
    }


def text_of_generate(model, prompt, *processors):
    ids = torch.tensor([prompt])
    settings = {"max_new_tokens": LENGTH, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    return model.generate(ids, logits_processor=LogitsProcessorList(processors), **settings)[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", IN)
def test_a_processor_of_transformers_writes_the_text_of_generate(model, name):
    arguments, prompt = IN[name]
    expected = text_of_generate(model, prompt, ALL[name](*arguments))
    assert (expected == text_of_generate(model, prompt)) == (name in NO_EFFECT_ON_GREEDY)
    job = {"max_new_tokens": LENGTH, "sampling": GREEDY}
    for schedule, ensemble in ensembles(model).items():
        processor = ALL[name](*arguments)
        assert ensemble.generate(prompt, logits_processors=[processor], **job).tokens == expected, schedule
    many = ensembles(model)["fixed"].generate_many([prompt] * 3, batch_size=2, logits_processors=[processor], **job)
    assert [text.tokens for text in many] == [expected] * 3


@pytest.mark.parametrize("name", OUT)
def test_a_processor_that_needs_more_than_a_row_is_refused_before_anything_is_read(model, name):
    processor = ALL[name].__new__(ALL[name])  # its constructor may want what there is none of here
    subclass = type("Derived", (ALL[name],), {})
    for ensemble, each in itertools.product(ensembles(model).values(), (processor, subclass.__new__(subclass))):
        for given in ([each], [LogitsProcessorList([each])]):
            with pytest.raises(ValueError, match=f"logits_processors: expected none of {name}: it "):
                ensemble.generate(PROMPT, logits_processors=given)


class Remembering:
    """Writes another text with every call."""

    def __init__(self):
        self.num_calls = 0

    def __call__(self, input_ids, scores):  # noqa: ARG002
        self.num_calls += 1
        return scores.roll(self.num_calls, 1)


def hidden_watermark():
    keys = {"ngram_len": 3, "keys": [654, 400, 836], "sampling_table_size": 1024, "sampling_table_seed": 0}
    watermark = ALL["SynthIDTextWatermarkLogitsProcessor"](**keys, context_history_size=64, device="cpu")
    return lambda ids, scores: watermark(ids, scores)


@pytest.mark.parametrize("make", [Remembering, hidden_watermark, lambda: lambda _, scores: torch.rand_like(scores)])
def test_a_processor_of_a_user_that_keeps_a_state_is_noticed(model, make):
    seen = []
    for ensemble in ensembles(model).values():
        with pytest.raises(ValueError, match="gave other logits when it was called twice"):
            ensemble.generate(PROMPT, logits_processors=[make()], on_tokens=seen.extend)
    assert not seen


def test_a_processor_may_write_into_its_row(model):
    def write(ids, scores):
        scores[:, ids[0, -1]] = 100.0 if ids.shape[1] % 2 else -100.0
        return scores

    expected = text_of_generate(model, PROMPT, write)
    for ensemble in ensembles(model).values():
        text = ensemble.generate(PROMPT, max_new_tokens=LENGTH, sampling=GREEDY, logits_processors=[write])
        assert text.tokens == expected


def test_a_processor_is_not_called_behind_a_stop_token(model):
    stop = text_of_generate(model, PROMPT)[5]

    def strict(ids, scores):
        assert stop not in ids[0, len(PROMPT) :].tolist()
        return scores

    for ensemble in ensembles(model).values():
        job = {"max_new_tokens": LENGTH, "stop_tokens": [stop], "logits_processors": [strict]}
        assert ensemble.generate(PROMPT, sampling=GREEDY, **job).tokens[-1] == stop
        assert all(text.tokens for text in ensemble.generate_many([PROMPT] * 6, seed=1, **job))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda _, scores: scores, "expected a list of functions, got function"),
        ([3], "expected functions of ids and logits, got 3"),
        ([lambda _, scores: scores[0]], r"expected logits \[1, 61\] from <lambda>, got \[61\]"),
        ([lambda *_: None], r"expected logits \[1, 61\] from <lambda>, got None"),
    ],
)
def test_wrong_processors_are_named(model, given, message):
    with pytest.raises(ValueError, match=f"logits_processors: {message}"):
        SpeculativeEnsemble([model], schedule="standard").generate(PROMPT, logits_processors=given)


GRAMMAR = {token: [(token * 7 + step) % VOCAB for step in (1, 2, 3)] for token in range(VOCAB)}


@pytest.mark.parametrize("rule", ["token", "gumbel"])
@pytest.mark.parametrize("num_members", [1, 2])
def test_a_prefix_function_is_asked_only_behind_what_it_allows(model, num_members, rule):
    """Drafts of a lookup know nothing of it; what stands after one that it excludes is no text of its language."""

    def allowed(_, ids):
        own = ids[len(PROMPT) - 1 :].tolist()
        assert all(after in GRAMMAR[before] for before, after in itertools.pairwise(own)), own
        return GRAMMAR[own[-1]]

    members = [model, relative_of(model, 1)][:num_members]
    lookup = SpeculativeEnsemble(members, schedule="fixed", drafter=PromptLookup(), rule=rule)
    plain = SpeculativeEnsemble(members, schedule="standard", rule=rule)
    processor = logits_process.PrefixConstrainedLogitsProcessor(allowed, 1)
    settings = {"max_new_tokens": 40, "sampling": GREEDY, "logits_processors": [processor]}
    own, other = (ensemble.generate(PROMPT, **settings) for ensemble in (lookup, plain))
    assert own.tokens == other.tokens
    assert sum(own.statistics.drafted) > sum(own.statistics.accepted)
