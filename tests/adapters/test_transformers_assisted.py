"""Assisted generation of transformers verified by `verify_chain`: what a user of `generate` gets."""

import pytest
import torch
import transformers
from driver.tiny_models import PROMPT, relative_of, tiny_llama, tiny_tokenizer
from specens.adapters.transformers import disable, enable
from transformers import BartConfig, BartForConditionalGeneration
from transformers.generation import utils

from specens_kernels import Sampling

IDS = torch.tensor([PROMPT])
TOKENS = 16
SOURCES = ["draft model", "prompt lookup", "early exit"]


@pytest.fixture(scope="module")
def target():
    model = tiny_llama(0, num_hidden_layers=4)
    model.generation_config.assistant_confidence_threshold = 0.0
    return model


@pytest.fixture(scope="module")
def assistant(target):
    return relative_of(target, 1, noise=0.2)


@pytest.fixture
def sources(assistant):
    return {
        "draft model": {"assistant_model": assistant},
        "prompt lookup": {"prompt_lookup_num_tokens": 4},
        "early exit": {"assistant_early_exit": 2},
    }


def generate(model, **arguments):
    return model.generate(IDS, **({"max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0} | arguments))


def test_greedy_texts_with_another_tokenizer_or_an_encoder_are_those_of_plain_greedy(target):
    tokenizers = {"tokenizer": tiny_tokenizer(), "assistant_tokenizer": tiny_tokenizer(40)}
    expected = generate(target)
    with enable():
        assert torch.equal(generate(target, assistant_model=tiny_llama(1, vocab=40), **tokenizers), expected)
    translator = tiny_bart(0)
    expected = generate(translator)
    with enable():
        assert torch.equal(generate(translator, assistant_model=relative_of(translator, 1, noise=0.1)), expected)


def tiny_bart(seed):
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "max_position_embeddings": 64}
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    ends = {"bos_token_id": 1, "eos_token_id": None, "decoder_start_token_id": 2, "forced_eos_token_id": None}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return BartForConditionalGeneration(BartConfig(vocab_size=61, init_std=0.3, **sizes, **ends)).eval()


class ForbidsTheLastToken(transformers.LogitsProcessor):
    """Depends on the prefix; remembers the prefixes that it was asked for."""

    def __init__(self):
        self.prefixes = []

    def __call__(self, input_ids, scores):
        self.prefixes.append(input_ids[0].tolist())
        return scores.index_fill(1, input_ids[0, -1:], float("-inf"))


class Stream:
    def __init__(self):
        self.tokens, self.rounds, self.ended = [], 0, False

    def put(self, tokens):
        self.tokens += tokens.flatten().tolist()
        self.rounds += 1

    def end(self):
        self.ended = True


@pytest.mark.parametrize(
    "processing",
    [
        {},
        {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
        {"min_new_tokens": 6, "eos_token_id": list(range(20)), "bad_words_ids": [[21], [22, 23]]},
    ],
    ids=["none", "penalties", "ends and words"],
)
@pytest.mark.parametrize("source", SOURCES)
def test_greedy_texts_are_those_of_plain_greedy(target, sources, source, processing):
    expected = generate(target, **processing)
    with enable():
        assert torch.equal(generate(target, **processing, **sources[source]), expected)


@pytest.mark.parametrize("source", SOURCES)
def test_other_processors_see_the_drafts_before_each_row(target, sources, source):
    plain = ForbidsTheLastToken()
    expected = generate(target, logits_processor=[plain])
    with enable():
        own = ForbidsTheLastToken()
        text = generate(target, logits_processor=[own], **sources[source])
    assert torch.equal(text, expected)
    settled = [expected[0, :length].tolist() for length in range(len(PROMPT), expected.shape[1])]
    assert all(prefix in own.prefixes for prefix in settled)


def test_only_the_filters_that_end_the_list_are_folded(monkeypatch, target, assistant):
    calls = []

    def verify_chain(*arguments, **keywords):
        calls.append(keywords["sampling"])
        return original(*arguments, **keywords)

    from specens.adapters.transformers import verification

    original = verification.verify_chain
    monkeypatch.setattr(verification, "verify_chain", verify_chain)
    filters = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01}
    with enable():
        generate(target, do_sample=True, **filters, repetition_penalty=1.2, assistant_model=assistant)
        assert {(s.temperature, s.top_k, s.top_p, s.min_p) for s in calls} == {(0.7, 20, 0.9, 0.01)}
        for unfoldable in ({"typical_p": 0.9}, {"renormalize_logits": True}):
            calls.clear()
            generate(target, do_sample=True, **filters, **unfoldable, assistant_model=assistant)
            assert {(s.temperature, s.filters) for s in calls} == {(1.0, False)}
        calls.clear()
        generate(target, assistant_model=assistant)
        assert {s.temperature for s in calls} == {0.0}


def test_an_assistant_filters_its_drafts_once_and_as_the_target_does(monkeypatch, target, assistant):
    made = []

    def get_logits_processor(model, *arguments, **keywords):
        made.append((model, original(model, *arguments, **keywords)))
        return made[-1][1]

    original = utils.GenerationMixin._get_logits_processor
    monkeypatch.setattr(utils.GenerationMixin, "_get_logits_processor", get_logits_processor)
    filters = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01}
    with enable():
        generate(target, do_sample=True, repetition_penalty=1.2, **filters, assistant_model=assistant)
    for model, processors in made:
        if model is assistant:
            penalty, filtering = processors
            assert isinstance(penalty, transformers.RepetitionPenaltyLogitsProcessor)
            assert filtering.sampling == Sampling(0.7, 20, 0.9, 0.01)
    assert {id(model) for model, _ in made} == {id(target), id(assistant)}


def test_set_seed_reproduces_a_text_and_greedy_leaves_the_generator_alone(target, sources):
    with enable():
        for source in sources.values():
            texts = []
            for seed in (3, 3, 4):
                transformers.set_seed(seed)
                texts.append(generate(target, do_sample=True, top_k=0, **source).tolist())
            assert texts[0] == texts[1] != texts[2]
            state = torch.get_rng_state()
            generate(target, **source)
            assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("source", SOURCES)
def test_the_output_of_return_dict_is_that_of_plain_generation(target, sources, source):
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "repetition_penalty": 1.3}
    expected = generate(target, output_hidden_states=True, **wanted)
    with enable():
        output = generate(target, output_hidden_states=True, **wanted, **sources[source])
    assert torch.equal(output.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(output.scores), torch.stack(expected.scores), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(torch.stack(output.logits), torch.stack(expected.logits), rtol=1e-3, atol=1e-3)
    assert len(output.hidden_states) == len(expected.hidden_states) == TOKENS


def test_scores_of_sampled_tokens_are_processed(target, assistant):
    settings = {"do_sample": True, "temperature": 0.5, "top_k": 3, "assistant_model": assistant}
    with enable():
        output = generate(target, return_dict_in_generate=True, output_scores=True, **settings)
    assert [int(row.isfinite().sum()) for row in output.scores] == [3] * TOKENS


@pytest.mark.parametrize("source", SOURCES)
def test_streams_and_stops_as_plain_generation_does(target, sources, source):
    endless = generate(target)[0, len(PROMPT) :].tolist()
    stop = next(token for index, token in enumerate(endless) if index >= 5 and token not in endless[:index])
    for ending in ({}, {"eos_token_id": stop}, {"max_new_tokens": 1}, {"max_new_tokens": 2}):
        expected = generate(target, **ending)
        stream = Stream()
        with enable():
            text = generate(target, streamer=stream, **ending, **sources[source])
        assert torch.equal(text, expected)
        assert stream.ended
        assert stream.tokens == expected[0].tolist()


def test_criteria_of_the_caller_end_a_text(target, assistant):
    class StopsAtTen(transformers.StoppingCriteria):
        def __call__(self, input_ids, scores, **_):  # noqa: ARG002
            return torch.tensor([input_ids.shape[1] >= len(PROMPT) + 10])

    with enable():
        text = generate(target, stopping_criteria=[StopsAtTen()], assistant_model=assistant)
    assert len(PROMPT) + 10 <= text.shape[1] < len(PROMPT) + TOKENS


def replaceable():
    mixin = utils.GenerationMixin
    return [utils._speculative_sampling, mixin._assisted_decoding, mixin._get_candidate_generator]


def test_transformers_gets_its_own_functions_back():
    own = replaceable()
    with enable():
        stand_ins = replaceable()
        assert not any(new is old for new, old in zip(stand_ins, own, strict=True))
        with enable():
            pass
        assert replaceable() == stand_ins  # the inner block leaves things as they were before it
        sampled = stand_ins[0](IDS, torch.zeros(1, 1, 61), 1, torch.zeros(1, 2, 61))  # nobody generates
        assert sampled[0].shape[1] <= 2
    assert replaceable() == own
    enable()
    assert replaceable() == stand_ins
    disable()
    disable()
    assert replaceable() == own


def test_an_error_in_the_block_gives_them_back_too():
    own = replaceable()
    block = enable()
    with pytest.raises(KeyError), block:
        raise KeyError
    assert replaceable() == own


def test_a_release_that_is_built_differently_is_refused(monkeypatch):
    monkeypatch.setattr(utils, "_speculative_sampling", lambda candidates: candidates)
    with pytest.raises(RuntimeError, match=r"^transformers .* expected _speculative_sampling with candidate_input_ids"):
        enable()
    monkeypatch.delattr(utils, "_speculative_sampling")
    with pytest.raises(RuntimeError, match="expected _speculative_sampling"):
        enable()


@pytest.mark.parametrize("do_sample", [False, True])
def test_logits_without_a_token_end_with_an_error(target, do_sample):
    class ForbidsAll(transformers.LogitsProcessor):
        def __call__(self, input_ids, scores):  # noqa: ARG002
            return torch.full_like(scores, float("-inf"))

    arguments = {"logits_processor": [ForbidsAll()], "do_sample": do_sample, "prompt_lookup_num_tokens": 2}
    with enable(), pytest.raises(RuntimeError, match=r"^no token can be drawn at position 4: .*NO_TOKEN"):
        generate(target, **arguments)


def test_an_ensemble_weight_needs_an_assistant_that_knows_every_token_and_room_for_them(target, assistant):
    weight = {"assistant_ensemble_weight": 0.5}
    tokenizers = {"tokenizer": tiny_tokenizer(), "assistant_tokenizer": tiny_tokenizer(40)}
    with enable():
        with pytest.raises(ValueError, match=r"^assistant_ensemble_weight: expected an assistant whose distribution"):
            generate(target, assistant_model=tiny_llama(1, vocab=40), **tokenizers, **weight)
        arguments = {"assistant_model": assistant, "cache_implementation": "static", **weight}
        with pytest.raises(ValueError, match=r"^max_new_tokens: expected prompt, new tokens and drafts to fit into"):
            generate(target, **arguments)
        roomy = generate(target, max_cache_len=len(PROMPT) + TOKENS, **arguments)
        assert torch.equal(roomy, generate(target, assistant_model=assistant, **weight))
