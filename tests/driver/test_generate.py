"""What a user of SpeculativeEnsemble sees: prompts, stops, streaming, statistics and errors."""

import copy

import peft
import pytest
import specens
import torch
from driver.kinds_of_tokenizers import tokenizer_of
from driver.tiny_models import PROMPT, record_members, relative_of, tiny_llama, tiny_tokenizer
from specens import MemberPrompts, SpeculativeEnsemble
from specens.drafters import DraftModel, OtherTokenizer
from specens.engines.transformers.causal_lm import CausalLM
from specens.settings.prompts import prompts_for_members

from specens_kernels import Contrastive, Mixture, Sampling

GREEDY = Sampling(temperature=0.0)
SCHEDULES = ["standard", "fixed", "alternate"]


@pytest.fixture(scope="module")
def pair():
    first = tiny_llama(0)
    return [first, relative_of(first, 1, noise=0.2)]


@pytest.mark.parametrize("draft_lens", [1, 6])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_text_ends_with_the_first_end_of_sequence(monkeypatch, pair, schedule, draft_lens):
    endless = SpeculativeEnsemble(pair, schedule="standard").generate(
        PROMPT, max_new_tokens=40, sampling=GREEDY, seed=0
    )
    members = record_members(monkeypatch)
    ensemble = SpeculativeEnsemble(pair, tiny_tokenizer(), schedule=schedule, draft_lens=draft_lens)
    for stop in set(endless.tokens):
        end = endless.tokens.index(stop)
        members.clear()
        result = ensemble.generate(PROMPT, max_new_tokens=40, sampling=GREEDY, seed=0, stop_tokens=[stop])
        assert result.tokens == endless.tokens[: end + 1]
        assert result.finish_reason == "stop"
        assert result.text == " ".join(f"w{token}" for token in result.tokens)
        statistics = result.statistics
        assert statistics.emitted == len(result.events) == end + 1
        assert statistics.rounds <= end + 1
        if schedule != "standard":
            assert sum(statistics.accepted) + statistics.recovered + statistics.bonus == end + 1
        for member in members:
            assert member.num_seen <= end + 1
            assert member.cache.get_seq_length() == len(PROMPT) + member.num_seen


def test_an_end_of_sequence_can_be_an_accepted_draft(pair):
    twins = [pair[0], relative_of(pair[0], 1, noise=0.0)]
    endless = SpeculativeEnsemble(twins).generate(PROMPT, max_new_tokens=40, sampling=GREEDY)
    stop = next(
        token for index, token in enumerate(endless.tokens) if token not in endless.tokens[:index] and index >= 2
    )
    ensemble = SpeculativeEnsemble(twins, schedule="fixed", draft_lens=8)
    result = ensemble.generate(PROMPT, max_new_tokens=40, sampling=GREEDY, stop_tokens=[stop])
    assert result.events[-1].kind == "draft accepted"
    assert result.tokens == endless.tokens[: endless.tokens.index(stop) + 1]
    assert result.statistics.rounds == 1
    assert sum(result.statistics.drafted) == len(result.tokens)  # nothing is drafted after the end


def test_end_of_sequence_comes_from_models_and_tokenizer():
    members = [tiny_llama(0, eos_token_id=[7, 9]), tiny_llama(1, eos_token_id=7)]
    assert SpeculativeEnsemble(members).end_of_sequence == {7, 9}
    assert SpeculativeEnsemble(members, tiny_tokenizer(eos_token="w4")).end_of_sequence == {4, 7, 9}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("draft_lens", [1, 5])
def test_the_text_has_max_new_tokens(pair, schedule, draft_lens):
    ensemble = SpeculativeEnsemble(pair, schedule=schedule, draft_lens=draft_lens)
    for length in range(12):
        result = ensemble.generate(PROMPT, max_new_tokens=length, seed=1)
        assert len(result.tokens) == length
        assert result.finish_reason == "length"
        assert max(result.statistics.tokens_fed) <= len(PROMPT) + 2 * length + 5


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_member_may_have_its_own_prompt(pair, schedule):
    prompts = [[5, 3, 8, 1], [2, 2, 9, 9, 4, 7, 1]]
    result = SpeculativeEnsemble(pair, schedule=schedule, draft_lens=2).generate(
        MemberPrompts(prompts), max_new_tokens=30, sampling=GREEDY
    )
    expected = []
    with torch.inference_mode():
        for _ in range(30):
            rows = [
                member(torch.tensor([prompt + expected])).logits[0, -1].softmax(-1)
                for member, prompt in zip(pair, prompts, strict=True)
            ]
            expected.append(int((rows[0] + rows[1]).argmax()))
    assert result.tokens == expected


def test_members_that_share_weights_are_forwarded_as_one_batch_under_standard(pair):
    model = pair[0]
    calls = []
    prompts = [[5, 3, 8, 1], [2, 2, 9, 9, 4, 7, 1], [1]]
    weights = Mixture((0.5, 0.3, 0.2))
    shared = SpeculativeEnsemble([model] * 3, ensemble=weights, schedule="standard")
    shared.generate(MemberPrompts(prompts), max_new_tokens=1)  # the first time it is tried whether the model can
    hook = model.register_forward_pre_hook(
        lambda _, __, arguments: calls.append(tuple(arguments["input_ids"].shape)), with_kwargs=True
    )
    result = shared.generate(MemberPrompts(prompts), max_new_tokens=20, sampling=GREEDY)
    hook.remove()
    assert calls == [(3, 7)] + [(3, 1)] * 19
    assert result.statistics.model_calls == 20
    assert result.statistics.forwards == [20] * 3
    assert result.statistics.tokens_fed == [len(prompt) + 19 for prompt in prompts]

    apart = [relative_of(model, 0, noise=0.0) for _ in range(3)]
    separate = SpeculativeEnsemble(apart, ensemble=weights, schedule="standard")
    expected = separate.generate(MemberPrompts(prompts), max_new_tokens=20, sampling=GREEDY)
    assert expected.statistics.model_calls == 60
    assert result.tokens == expected.tokens
    drafted = SpeculativeEnsemble([model] * 3, ensemble=weights, schedule="fixed", draft_lens=3)
    assert drafted.generate(MemberPrompts(prompts), max_new_tokens=20, sampling=GREEDY).tokens == expected.tokens


def test_two_models_share_weights_where_they_use_the_same_memory(pair):
    model = pair[0]
    view = tiny_llama(9)
    for own, other in zip(view.parameters(), model.parameters(), strict=True):
        own.data = other.data
    groups = specens.settings.arguments.group_by_weights(
        SpeculativeEnsemble([model, pair[1], view], schedule="standard").models
    )
    assert groups == [[0, 2], [1]]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_streamed_pieces_make_up_the_text(pair, schedule):
    pieces = []
    ensemble = SpeculativeEnsemble(pair, tiny_tokenizer(), schedule=schedule, draft_lens=3)
    result = ensemble.generate(
        "w5 w3 w8", max_new_tokens=25, seed=2, on_tokens=lambda events: pieces.append("".join(e.text for e in events))
    )
    assert len(pieces) == result.statistics.rounds
    assert "".join(pieces) == result.text == tiny_tokenizer().decode(result.tokens)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ctrl_c_returns_what_was_generated(pair, schedule):
    seen = []

    def stop_at_ten(events):
        seen.extend(event.token for event in events)
        if len(seen) >= 10:
            raise KeyboardInterrupt

    ensemble = SpeculativeEnsemble(pair, schedule=schedule, draft_lens=3)
    result = ensemble.generate(PROMPT, max_new_tokens=40, seed=2, on_tokens=stop_at_ten)
    assert result.interrupted
    assert result.finish_reason == "interrupted"
    assert result.tokens == seen
    assert result.statistics.emitted == len(seen)
    assert result.tokens == ensemble.generate(PROMPT, max_new_tokens=40, seed=2).tokens[: len(seen)]


def test_ctrl_c_gives_out_the_text_that_a_stop_string_might_have_begun_with(pair):
    ensemble = SpeculativeEnsemble(pair, tiny_tokenizer(), schedule="fixed", draft_lens=3)
    endless = ensemble.generate(PROMPT, max_new_tokens=10, seed=2)

    def interrupt(_):
        raise KeyboardInterrupt

    stop = endless.text[:2] + " never comes"
    result = ensemble.generate(PROMPT, max_new_tokens=10, seed=2, stop_strings=[stop], on_tokens=interrupt)
    assert result.interrupted
    assert result.text == tiny_tokenizer().decode(result.tokens) != ""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_special_tokens_are_shown_or_not_and_end_a_text_either_way(pair, schedule):
    tokenizer = tiny_tokenizer()
    ensemble = SpeculativeEnsemble(pair, tokenizer, schedule=schedule)
    tokens = ensemble.generate(PROMPT, max_new_tokens=20, sampling=GREEDY).tokens
    index = next(index for index in range(3, 20) if tokens[index] not in tokens[:index])
    tokenizer.add_special_tokens({"additional_special_tokens": [f"w{tokens[index]}"]})
    job = {"max_new_tokens": 20, "sampling": GREEDY}
    for skip in (True, False):
        text = ensemble.generate(PROMPT, skip_special_tokens=skip, **job)
        assert text.text == tokenizer.decode(tokens, skip_special_tokens=skip)
        settings = job | {"skip_special_tokens": skip, "stop_strings": [f"w{tokens[index]}"]}
        for ended in (ensemble.generate(PROMPT, **settings), *ensemble.generate_many([PROMPT] * 3, **settings)):
            assert ended.tokens == tokens[: index + 1]
            assert ended.finish_reason == "stop"
            assert ended.text.rstrip() == tokenizer.decode(tokens[:index])
        longer = ensemble.generate(PROMPT, min_new_tokens=index + 2, **settings)
        assert len(longer.tokens) >= index + 2
    assert tokenizer.decode(tokens) != tokenizer.decode(tokens, skip_special_tokens=True)


def test_ctrl_c_within_a_forward_returns_the_settled_tokens(monkeypatch, pair):
    ensemble = SpeculativeEnsemble(pair, schedule="alternate", draft_lens=3)
    complete = ensemble.generate(PROMPT, max_new_tokens=40, seed=2)
    forward, calls = pair[1].forward, []

    def interrupted_forward(*arguments, **keywords):
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return forward(*arguments, **keywords)

    monkeypatch.setattr(pair[1], "forward", interrupted_forward)
    result = ensemble.generate(PROMPT, max_new_tokens=40, seed=2)
    assert result.interrupted
    assert 0 < len(result.tokens) < 40
    assert result.tokens == complete.tokens[: len(result.tokens)]


def test_members_may_have_logits_of_different_sizes():
    members = [tiny_llama(0, vocab=61), tiny_llama(0, vocab=64)]
    members[1].lm_head.weight.data[61:] = 0  # padding: as likely as the mean token
    members[1].lm_head.weight.data[61:, 0] = -100.0
    for schedule in SCHEDULES:
        ensemble = SpeculativeEnsemble(members, tiny_tokenizer(), ensemble=Mixture((0.9, 0.1)), schedule=schedule)
        assert len(ensemble.generate(PROMPT, max_new_tokens=20, sampling=GREEDY).tokens) == 20


def test_a_token_that_a_member_cannot_read_is_named():
    members = [tiny_llama(0, vocab=61), tiny_llama(1, vocab=200)]
    ensemble = SpeculativeEnsemble(members, ensemble=Mixture((0.1, 0.9)), schedule="standard")
    with pytest.raises(ValueError, match=r"token \d+ was generated, but member 0 has embeddings only for ids below 61"):
        ensemble.generate(PROMPT, max_new_tokens=60, seed=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"schedule": "zigzag"}, "schedule: expected one of standard, fixed, alternate, parallel, tree; got 'zigzag'"),
        ({"schedule": ["fixed"]}, r"schedule: expected one of .*; got \['fixed'\]"),
        ({"draft_lens": 0}, "draft_lens: expected an integer >= 1"),
        ({"draft_lens": (1, 2, 3)}, "draft_lens: expected an integer >= 1"),
        ({"draft_lens": 1.5}, "draft_lens: expected an integer >= 1"),
        ({"drafter": 2}, "drafter: expected the index of a member, 0 to 1; got 2"),
        ({"ensemble": Mixture((0.2, 0.3, 0.5))}, "ensemble: expected weights for the 2 members, got 3"),
    ],
)
def test_wrong_settings_are_named(pair, arguments, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeEnsemble(pair, **arguments)


def test_schedules_say_how_many_members_they_need(pair):
    for schedule in ("fixed", "alternate"):
        with pytest.raises(ValueError, match=f"expected two members or more for '{schedule}', got 1"):
            SpeculativeEnsemble([pair[0]], schedule=schedule)
    with pytest.raises(ValueError, match="ensemble: expected weights for the 3 members, got 2"):
        SpeculativeEnsemble([*pair, pair[0]], schedule="fixed", ensemble=Contrastive(0.1))
    for members in ([], "a-path", None):
        with pytest.raises(ValueError, match="members: expected a list with at least one model"):
            SpeculativeEnsemble(members)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": []}, "prompt: expected at least one token"),
        ({"prompt": 5}, "prompt: expected text, token ids"),
        ({"prompt": "hello"}, "prompt: text needs a tokenizer"),
        (
            {"prompt": MemberPrompts([[1], [2], [3]])},
            "prompt: expected one prompt, or one for each of the 2 members; got 3",
        ),
        ({"prompt": [1, -1]}, "prompt: expected token ids >= 0, got -1"),
        ({"prompt": [1, 61]}, "prompt: expected ids < 61 for member 0, got 61"),
        ({"prompt": torch.zeros(1, 3)}, "prompt: expected one-dimensional token ids"),
        ({"prompt": MemberPrompts([[1, 2], [0.5]])}, "prompt: expected text, token ids"),
        ({"prompt": ["w1", "w2"]}, r"prompt: expected text, .* generate_many; one for each member is MemberPrompts"),
        ({"prompt": ["w1"]}, r"prompt: expected text, .* got a list of 1"),
        ({"prompt": [1], "seed": 2**63}, "seed: expected an integer of 64 bits, got 9223372036854775808"),
        ({"prompt": [1], "stop_tokens": 5}, "stop_tokens: expected a list of token ids, got 5"),
        ({"prompt": [1], "sampling": 0.5}, "sampling: expected specens_kernels.Sampling, got float"),
        ({"prompt": [1], "sampling": {}}, "sampling: expected specens_kernels.Sampling, got dict"),
        ({"prompt": [1], "top_k": torch.ones(2)}, r"top_k: expected one number, got \[2\]"),
        ({"prompt": [1], "top_logprobs": []}, r"top_logprobs: expected an integer >= 0, got \[\]"),
        ({"prompt": [1], "stop_strings": 5}, "stop_strings: expected a list of texts that are not empty, got 5"),
        ({"prompt": [1], "stop": {"a": 1}}, "stop_strings: expected a list of texts that are not empty, got {'a': 1}"),
        ({"prompt": [1], "logits_processors": "top"}, "logits_processors: expected a list of functions, got str"),
        ({"prompt": [1], "logits_processors": ["top"]}, "logits_processors: expected functions of ids .*, got 'top'"),
        ({"prompt": [1], "constraint": [1]}, "constraint: expected a function of token ids, got list"),
        ({"prompt": [1], "max_new_tokens": -1}, "max_new_tokens: expected an integer >= 0, got -1"),
        ({"prompt": [1], "max_new_tokens": 600}, "max_new_tokens: expected at most 511 after the prompt of 1 tokens"),
    ],
)
def test_wrong_jobs_are_named(pair, arguments, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeEnsemble(pair).generate(**arguments)


def test_prompts_may_be_tensors_text_or_chat_messages(pair):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}w1 {{ m['content'] }} w2 {% endfor %}"
    ensemble = SpeculativeEnsemble(pair, tokenizer)
    job = {"max_new_tokens": 10, "seed": 0}
    expected = ensemble.generate([1, 5, 3, 2], **job).tokens
    assert ensemble.generate(torch.tensor([1, 5, 3, 2]), **job).tokens == expected
    assert ensemble.generate("w1 w5 w3 w2", **job).tokens == expected
    assert ensemble.generate("w5 w3", chat=True, **job).tokens == expected
    assert ensemble.generate([{"role": "user", "content": "w5 w3"}], **job).tokens == expected
    assert ensemble.generate(MemberPrompts(["w1 w5 w3 w2", [1, 5, 3, 2]]), **job).tokens == expected
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="chat: the tokenizer has no chat template"):
        ensemble.generate("w5", chat=True, **job)


def test_the_former_list_of_token_ids_for_each_member_is_warned_of(pair):
    ensemble, prompts, job = SpeculativeEnsemble(pair), [[5, 3, 8, 1], [2, 9]], {"max_new_tokens": 10, "seed": 0}
    with pytest.warns(FutureWarning, match=r"MemberPrompts"):
        former = ensemble.generate(prompts, **job)
    assert former.tokens == ensemble.generate(MemberPrompts(prompts), **job).tokens
    with pytest.raises(ValueError, match=r"prompts: expected a list with a prompt for each member, got str"):
        MemberPrompts("hi")


@pytest.mark.parametrize("drafter", [None, "model"])
def test_members_come_back_in_the_mode_that_they_came_in(drafter):
    first = tiny_llama(0, attention_dropout=0.5)
    models = [first, relative_of(first, 1, noise=0.2), relative_of(first, 2, noise=0.2)]
    arguments = {} if drafter is None else {"drafter": DraftModel(models[2])}
    ensemble = SpeculativeEnsemble(models[:2], **arguments)
    expected = ensemble.generate(PROMPT, max_new_tokens=20, seed=0).tokens
    for model in models:
        model.train()
    models[0].model.layers[0].eval()  # a part that its owner has frozen
    modes = [[module.training for module in model.modules()] for model in models]
    assert ensemble.generate(PROMPT, max_new_tokens=20, seed=0).tokens == expected
    for text in ensemble.generate_many([PROMPT, PROMPT], seed=0, max_new_tokens=20):
        assert [[module.training for module in model.modules()] for model in models] == modes
        assert text.index or text.tokens == expected
    SpeculativeEnsemble(models[:2], **arguments)
    assert [[module.training for module in model.modules()] for model in models] == modes


def test_a_chat_template_that_begins_with_the_first_token_has_it_once():
    tokenizer = tokenizer_of("llama")
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    chat = copy.deepcopy(tokenizer)
    chat.chat_template = template
    ids = prompts_for_members("a the", 1, chat, True)[0]
    assert (ids.count(chat.bos_token_id), ids.count(chat.eos_token_id)) == (1, 1)
    assert chat.decode(ids, skip_special_tokens=True) == "a the"
    assert ids == prompts_for_members([{"role": "user", "content": "a the"}], 1, chat, False)[0]


def test_members_may_carry_an_adapter_that_is_not_merged(pair):
    adapted = peft.get_peft_model(
        tiny_llama(0), peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj"])
    )
    merged = peft.get_peft_model(
        tiny_llama(0), peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj"])
    )
    merged.load_state_dict(adapted.state_dict())
    members = [[adapted, pair[1]], [merged.merge_and_unload(), pair[1]]]
    texts = [SpeculativeEnsemble(pair).generate(PROMPT, max_new_tokens=30, sampling=GREEDY).tokens for pair in members]
    assert texts[0] == texts[1]


def test_members_with_different_active_adapters_of_one_model_are_different_models():
    """Each writes with the adapter that was active when it was given, whichever is active elsewhere."""
    settings = {"r": 4, "init_lora_weights": False, "target_modules": ["q_proj", "v_proj"]}
    model = peft.get_peft_model(tiny_llama(0), peft.LoraConfig(**settings), adapter_name="first")
    model.add_adapter("second", peft.LoraConfig(**settings))
    members, expected = [], []
    for name in ("first", "second"):
        model.set_adapter(name)
        ids = torch.tensor([PROMPT])
        text = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
        expected.append(text[0, len(PROMPT) :].tolist())
        members.append(CausalLM(model))
    assert expected[0] != expected[1]
    assert not members[0].is_same_as(members[1])
    assert members[1].is_same_as(CausalLM(model))
    for active in ("first", "second"):
        model.set_adapter(active)
        for schedule, weights, text in (
            ("fixed", (0, 1), expected[1]),
            ("alternate", (1, 0), expected[0]),
            ("standard", (0, 1), expected[1]),
        ):
            ensemble = SpeculativeEnsemble(members, None, Mixture(weights), 3, schedule)
            many = ensemble.generate_many([PROMPT, PROMPT[:2]], max_new_tokens=20, sampling=GREEDY, batch_size=2)
            assert next(one for one in many if one.index == 0).tokens == text
        assert model.active_adapters == [active]


def test_what_is_for_specs_is_refused_beside_loaded_models(pair):
    for name, value in (("dtype", "fp16"), ("device", "cpu"), ("revision", "main")):
        with pytest.raises(ValueError, match=f"^{name}: expected none beside loaded models, .* got '{value}'"):
            SpeculativeEnsemble(pair, **{name: value})
    for name, value in (("dtype", "fp16"), ("device", "cpu"), ("ray_options", {"num_gpus": 1})):
        with pytest.raises(ValueError, match=f"^{name}: expected none beside loaded models"):
            DraftModel(pair[1], **{name: value})
        with pytest.raises(ValueError, match=f"^{name}: expected none beside loaded models"):
            OtherTokenizer(pair[1], tiny_tokenizer(), **{name: value})


def test_ids_of_a_tokenizer_without_an_embedding_are_refused_only_where_they_are_read(pair):
    """As CodeLlama 34B and Gemma 3 1B: their tokenizers have a few ids more than their models have embeddings."""
    ensemble = SpeculativeEnsemble(pair, tiny_tokenizer(vocab=80))
    assert len(ensemble.generate("w5 w60", max_new_tokens=5).tokens) == 5
    with pytest.raises(ValueError, match="prompt: expected ids < 61 for member 0, got 61"):
        ensemble.generate("w5 w61", max_new_tokens=5)


@pytest.mark.parametrize("schedule", [*SCHEDULES, "tree"])
def test_embeddings_without_an_id_of_the_tokenizer_may_be_generated(pair, schedule):
    ensemble = SpeculativeEnsemble(pair, tiny_tokenizer(vocab=9), schedule=schedule)
    text = ensemble.generate("w5 w7", max_new_tokens=40, sampling=GREEDY)
    assert max(text.tokens) >= 9
    assert text.text.replace(" ", "") == "".join(f"w{token}" for token in text.tokens if token < 9)


def test_a_distribution_without_any_token_is_an_error():
    broken = tiny_llama(0)
    broken.lm_head.weight.data[:] = float("nan")
    with pytest.raises(RuntimeError, match="no token can be drawn at generated token 0: NAN_LOGITS"):
        SpeculativeEnsemble([broken], schedule="standard").generate(PROMPT, max_new_tokens=4)
