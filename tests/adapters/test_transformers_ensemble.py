"""`generate(custom_generate=speculative_ensemble)`: the ensemble's text with the arguments that users know."""

import pytest
import torch
import transformers
from adapters.markov import LEAST_PROBABILITY, fit, logits_after, markov_llama
from driver.test_generation_config import GREEDY_FIELDS
from driver.tiny_models import relative_of, tiny_llama, tiny_tokenizer
from specens import SpeculativeEnsemble
from specens.adapters.transformers import ensemble as adapter
from specens.adapters.transformers import speculative_ensemble
from specens.adapters.transformers.settings import DONE_BY_GENERATE, SUPPORTED_VALUES
from specens.engines.transformers.generation_config import HONOURED, MEANINGLESS
from transformers import GenerationConfig, StoppingCriteria, TextStreamer

from specens_kernels import Mixture, Sampling

PROMPTS = [[5, 3, 8, 1], [2, 2, 9, 9, 4, 7, 1]]
PADDED = torch.tensor([[0, 0, 0, 5, 3, 8, 1], [2, 2, 9, 9, 4, 7, 1]])
MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])
WEIGHTS = Mixture((0.3, 0.7))
TOKENS = 20
GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def pair():
    first = tiny_llama(0)
    return [first, relative_of(first, 1, noise=0.3)]


def generate(pair, ids=PADDED[1:], **arguments):
    settings = {"max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0, "ensemble": WEIGHTS}
    settings |= {"custom_generate": speculative_ensemble, "members": pair[1:]} | arguments
    return pair[0].generate(ids, **settings)


def standard(pair, prompt, **arguments):
    """The tokens without speculation."""
    decoder = SpeculativeEnsemble(pair, None, WEIGHTS, schedule="standard")
    settings = {"max_new_tokens": TOKENS, "sampling": GREEDY, "stop_tokens": ()}
    return decoder.generate(prompt, **(settings | arguments)).tokens


@pytest.mark.parametrize(
    "schedule",
    [{}, {"schedule": "fixed", "draft_lens": 3}, {"schedule": "tree", "tree": (2, 2)}, {"schedule": "standard"}],
    ids=["default", "fixed", "tree", "standard"],
)
def test_greedy_texts_are_those_of_the_ensemble(pair, schedule):
    text = generate(pair, **schedule)
    assert text.dtype == torch.int64
    assert text.tolist() == [PROMPTS[1] + standard(pair, PROMPTS[1])]


def test_a_batch_is_padded_on_the_left_and_texts_end_on_their_own(pair):
    texts = [standard(pair, prompt) for prompt in PROMPTS]
    assert texts[0] != texts[1]
    stop = next(token for token in texts[0][2:-2] if token not in texts[1])
    end = texts[0].index(stop) + 1
    result = generate(pair, PADDED, attention_mask=MASK, eos_token_id=stop)
    assert result[0].tolist() == PADDED[0].tolist() + texts[0][:end] + [0] * (TOKENS - end)
    assert result[1].tolist() == PROMPTS[1] + texts[1]


def test_sampled_texts_follow_the_mixture():
    pair = [markov_llama(0), markov_llama(1)]
    law = sum(weight * logits_after(model).softmax(-1) for weight, model in zip(WEIGHTS.weights, pair))
    torch.manual_seed(0)
    ids = torch.tensor([[1], [2]])
    texts = generate(pair, ids, do_sample=True, top_k=0, max_new_tokens=500)
    assert fit(texts, law) > LEAST_PROBABILITY
    assert fit(texts, logits_after(pair[0]).softmax(-1)) < LEAST_PROBABILITY


def test_sampling_parameters_are_those_of_the_config(monkeypatch, pair):
    seen = []

    def generate_texts(decoder, prompts, rows, job, edits):
        seen.append(job["sampling"])
        original(decoder, prompts, rows, job, edits)

    original = adapter._generate
    monkeypatch.setattr(adapter, "_generate", generate_texts)
    config = GenerationConfig(do_sample=True, temperature=0.7, top_k=9, top_p=0.8, min_p=0.02, max_new_tokens=3)
    pair[0].generate(
        PADDED[1:], generation_config=config, custom_generate=speculative_ensemble, members=pair[1:], pad_token_id=0
    )
    generate(pair, do_sample=True)  # top-k is 50 where nobody says otherwise
    assert seen == [Sampling(0.7, 9, 0.8, 0.02), Sampling(1.0, 50)]


def test_set_seed_reproduces_texts_which_differ_from_each_other(pair):
    results = []
    for seed in (1, 1, 2):
        transformers.set_seed(seed)
        results.append(generate(pair, do_sample=True, num_return_sequences=3).tolist())
    assert results[0] == results[1] != results[2]
    assert len({tuple(text) for text in results[0]}) == 3
    state = torch.get_rng_state()
    generate(pair)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_streamer_prints_the_text(capsys, pair):
    tokenizer = tiny_tokenizer()
    text = generate(pair, streamer=TextStreamer(tokenizer, skip_prompt=True))
    assert capsys.readouterr().out.split() == tokenizer.decode(text[0, len(PROMPTS[1]) :]).split()


@pytest.mark.parametrize("draft_lens", [1, 8])
def test_stopping_criteria_end_a_text_in_the_middle_of_a_round(pair, draft_lens):
    class StopsAtThree(StoppingCriteria):
        def __call__(self, input_ids, scores, **_):  # noqa: ARG002
            return torch.tensor([input_ids.shape[1] == PADDED.shape[1] + 3] * len(input_ids))

    twins = [pair[0], relative_of(pair[0], 0, noise=0.0)]
    text = generate(twins, draft_lens=draft_lens, schedule="fixed", stopping_criteria=[StopsAtThree()])
    assert text[0, PADDED.shape[1] :].tolist() == standard(twins, PROMPTS[1])[:3]
    assert generate(pair, max_time=0.0).shape[1] == PADDED.shape[1] + 1


def test_return_dict_gives_the_sequences(pair):
    output = generate(pair, return_dict_in_generate=True)
    assert torch.equal(output.sequences, generate(pair))
    assert output.keys() == {"sequences": None}.keys()


def test_ctrl_c_is_not_swallowed(pair):
    class Interrupts(StoppingCriteria):
        def __call__(self, input_ids, scores, **_):  # noqa: ARG002
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(pair, stopping_criteria=[Interrupts()])


class Stream:
    def put(self, tokens):
        pass

    def end(self):
        pass


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("guidance_scale", {"guidance_scale": 1.5}),
        ("penalty_alpha", {"penalty_alpha": 0.5}),
        ("num_beams", {"num_beams": 2}),
        ("cache_implementation", {"cache_implementation": "static"}),
        ("prompt_lookup_num_tokens", {"prompt_lookup_num_tokens": 2}),
        ("output_scores", {"output_scores": True, "return_dict_in_generate": True}),
        ("output_hidden_states", {"output_hidden_states": True, "return_dict_in_generate": True}),
        ("assistant_model", {"assistant_model": tiny_llama(3)}),
        ("cache", {"cache": transformers.DynamicCache()}),
        ("members", {"members": ["some/model"]}),
        ("members", {"members": []}),
        ("ensemble", {"ensemble": Mixture((0.2, 0.3, 0.5))}),
        ("schedule", {"schedule": "sometimes"}),
        ("streamer", {"inputs": PADDED, "attention_mask": MASK, "streamer": Stream()}),
        ("attention_mask", {"inputs": PADDED, "attention_mask": MASK.flip(1)}),
        ("position_ids", {"position_ids": torch.arange(7)[None] + 3}),
        ("inputs_embeds", {"inputs_embeds": torch.zeros(1, 7, 32)}),
        ("max_new_tokens", {"max_new_tokens": 600}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_supported_is_named(pair, name, arguments):
    ids = arguments.get("inputs", PADDED[1:])
    others = {key: value for key, value in arguments.items() if key != "inputs"}
    with pytest.raises(ValueError, match=rf"^{name}: expected "):
        generate(pair, ids, **others)


@pytest.mark.parametrize("name", GREEDY_FIELDS)
def test_greedy_texts_of_a_batch_are_those_of_generate_whatever_edits_the_logits(pair, name):
    fields = {"max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0} | GREEDY_FIELDS[name]
    fields.pop("prompt", None)
    if fields["max_new_tokens"] is None:
        fields["max_length"] += PADDED.shape[1]
    batch = {"attention_mask": MASK, **fields}
    expected = pair[0].generate(PADDED, **batch)
    assert torch.equal(generate(pair, PADDED, ensemble=Mixture((1.0, 0.0)), **batch), expected)


def test_sampled_texts_follow_filters_that_the_verification_does_not_know():
    pair = [markov_llama(0), markov_llama(1)]
    law = torch.stack([filtered(row) for row in logits_after(pair[0])])
    torch.manual_seed(0)
    settings = {"do_sample": True, "top_k": 0, "typical_p": 0.7, "max_new_tokens": 400, "ensemble": Mixture((1.0, 0.0))}
    texts = generate(pair, torch.tensor([[1], [2]]), **settings)
    assert fit(texts, law) > LEAST_PROBABILITY
    assert fit(texts, logits_after(pair[0]).softmax(-1)) < LEAST_PROBABILITY


def filtered(row):
    return transformers.TypicalLogitsWarper(0.7)(None, row[None].float())[0].softmax(-1)


def test_prefix_constraints_and_processors_of_the_caller_see_their_own_row(pair):
    def allowed(batch_id, ids):
        return [10 + batch_id, 20 + batch_id] if len(ids) % 2 else [30 + batch_id]

    class NoNine(transformers.LogitsProcessor):
        def __call__(self, input_ids, scores):
            assert input_ids.shape[1] >= PADDED.shape[1]
            return scores.index_fill(1, torch.tensor([9]), float("-inf"))

    settings = {"attention_mask": MASK, "do_sample": False, "max_new_tokens": 8, "pad_token_id": 0}
    for own in ({"prefix_allowed_tokens_fn": allowed}, {"logits_processor": [NoNine()]}):
        expected = pair[0].generate(PADDED, **settings, **own)
        assert torch.equal(generate(pair, PADDED, ensemble=Mixture((1.0, 0.0)), **settings, **own), expected)


def test_every_field_of_a_generation_config_is_done_by_generate_or_refused():
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert fields == {*HONOURED, *MEANINGLESS, *SUPPORTED_VALUES, *DONE_BY_GENERATE} & fields


def test_texts_of_different_lengths_need_a_padding_id(pair):
    class StopsTheFirst(StoppingCriteria):
        def __call__(self, input_ids, scores, **_):  # noqa: ARG002
            return torch.tensor([int(row[-8]) == 0 for row in input_ids])

    with pytest.raises(ValueError, match=r"^pad_token_id: expected an id"):
        generate(pair, PADDED, attention_mask=MASK, pad_token_id=None, stopping_criteria=[StopsTheFirst()])
