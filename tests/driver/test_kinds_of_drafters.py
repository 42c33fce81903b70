"""What each drafter that is no member proposes, and what that costs."""

import copy
from pathlib import Path

import pytest
import torch
from driver.cache_models import tiny_model
from driver.test_drafters import REPETITIVE
from driver.test_schedules import GREEDY
from driver.tiny_models import PROMPT, Bigram, HeadedBigram, relative_of, tiny_llama, tiny_tokenizer
from peft import LoraConfig, get_peft_model
from specens import MemberPrompts, SpeculativeEnsemble
from specens.decoding.request import OUTSIDE
from specens.drafters import DraftModel, Heads, Jacobi, LayerSkip, Lookahead, PromptLookup
from specens.engines.transformers.causal_lm import CausalLM
from specens.engines.transformers.fewer_layers import with_layers
from specens.engines.transformers.load import load_model

from specens_kernels import LogitMixture, Mixture, NgramIndex, Sampling

PAGE = Path(__file__).parents[2] / "docs" / "drafters.md"


@pytest.fixture(scope="module")
def pair():
    first = tiny_llama(0, num_hidden_layers=3)
    return [first, relative_of(first, 1, noise=0.2)]


def test_a_draft_model_spends_forwards_of_its_own(pair):
    twin = relative_of(pair[0], 0, noise=0.0)
    ensemble = SpeculativeEnsemble(pair[:1], draft_lens=3, schedule="fixed", drafter=DraftModel(twin))
    result = ensemble.generate(PROMPT, max_new_tokens=40, seed=1)
    statistics = result.statistics
    assert statistics.acceptance_rate == 1.0
    assert statistics.rounds == statistics.bonus == statistics.forwards[0] == 10
    assert statistics.drafter_forwards == 30
    assert statistics.drafter_tokens_fed == len(PROMPT) + 39 - 1  # the last draft and its bonus token are never read
    assert statistics.model_calls == 40
    assert 0 < statistics.drafter_seconds < statistics.seconds
    assert statistics.overhead_seconds < statistics.seconds - statistics.drafter_seconds
    assert {event.proposer for event in result.events} == {None}
    assert [event.kind for event in result.events].count("draft accepted") == statistics.accepted[OUTSIDE] == 30


def test_a_draft_model_is_the_member_of_weight_0_with_other_bookkeeping(pair):
    sampling = Sampling(temperature=0.9, top_k=7)
    outside = SpeculativeEnsemble(pair[:1], draft_lens=3, schedule="fixed", drafter=DraftModel(pair[1]))
    member = SpeculativeEnsemble(pair, ensemble=Mixture((1.0, 0.0)), draft_lens=3, schedule="fixed", drafter=1)
    for seed in range(3):
        one, other = (
            owner.generate(PROMPT, seed=seed, sampling=sampling, max_new_tokens=40) for owner in (outside, member)
        )
        assert one.tokens == other.tokens
        assert one.statistics.accepted[OUTSIDE] == other.statistics.accepted[1]
        assert one.statistics.drafter_forwards == other.statistics.forwards[1]


@pytest.mark.parametrize("kind", ["full", "sliding_hybrid", "sliding"])
@torch.inference_mode()
def test_skipped_layers_leave_the_model_of_the_others(kind):
    model = tiny_model(kind, num_hidden_layers=2)
    before = copy.deepcopy(model.state_dict()), str(model.config), list(model.model.layers)
    for kept in ([1], [0], [1, 0]):
        fewer = with_layers(model, kept)
        config = copy.deepcopy(model.config)
        config.num_hidden_layers = len(kept)
        if getattr(config, "layer_types", None):
            config.layer_types = [model.config.layer_types[number] for number in kept]
        built = type(model)(config).eval()
        own = {name: value for name, value in model.state_dict().items() if ".layers." not in name}
        for index, number in enumerate(kept):
            part = model.model.layers[number].state_dict().items()
            own |= {f"model.layers.{index}.{name}": value for name, value in part}
        built.get_output_embeddings().weight = torch.nn.Parameter(torch.zeros(61, 32))  # not tied to the embedding
        built.load_state_dict(own)
        caches = [CausalLM(fewer).new_cache(), CausalLM(built).new_cache()]
        for ids in torch.arange(24).split([10, 1, 3, 10]):
            rows = [m(ids[None], cache=cache).logits for m, cache in zip((fewer, built), caches, strict=True)]
            torch.testing.assert_close(*rows)
        assert {weight.data_ptr() for weight in fewer.parameters()} <= {
            weight.data_ptr() for weight in model.parameters()
        }
    assert str(model.config) == before[1]
    assert list(model.model.layers) == before[2]
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == [0, 1]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[0][name])


def test_prompt_lookup_accepts_what_repeats():
    """A model that says its prompt again and again."""
    table = torch.full((61, 61), -9.0)
    for token, after in zip(REPETITIVE, REPETITIVE[1:] + REPETITIVE[:1], strict=True):
        table[token, after] = 9.0
    ensemble = SpeculativeEnsemble([Bigram(table)], draft_lens=6, schedule="fixed", drafter=PromptLookup())
    statistics = ensemble.generate(REPETITIVE, max_new_tokens=70, seed=0).statistics
    assert statistics.accepted[OUTSIDE] == statistics.tested[OUTSIDE] == 60
    assert statistics.forwards == [10]


def test_a_store_of_the_text_itself_is_accepted_whole(pair):
    text = SpeculativeEnsemble(pair[:1], tiny_tokenizer(), schedule="standard").generate(
        PROMPT, max_new_tokens=60, sampling=GREEDY
    )
    words, ids = " ".join(f"w{token}" for token in PROMPT + text.tokens), PROMPT + text.tokens
    for store in ([words], [[7, 7], ids], NgramIndex(ids)):
        drafter = PromptLookup(min_match=3, store=store)
        ensemble = SpeculativeEnsemble(pair[:1], tiny_tokenizer(), draft_lens=5, schedule="fixed", drafter=drafter)
        result = ensemble.generate(PROMPT, max_new_tokens=60, sampling=GREEDY)
        assert result.tokens == text.tokens
        assert result.statistics.acceptance_rate == 1.0
        assert result.statistics.rounds <= 12


def test_guesses_that_do_not_hang_on_the_last_token_come_true():
    table = torch.full((61, 61), -9.0)
    table[:, 7] = 9.0
    ensemble = SpeculativeEnsemble([Bigram(table)], draft_lens=4, schedule="fixed", drafter=Jacobi())
    result = ensemble.generate([0], max_new_tokens=42, sampling=GREEDY)
    # A token of the prompt is rejected, the four guesses after it are right, and then there are none.
    assert [event.kind for event in result.events] == (["recovered"] + ["draft accepted"] * 4 + ["bonus"]) * 7


def test_n_grams_of_earlier_guesses_come_true():
    """A model that counts: a guess after a wrong token is wrong, but its n-gram will come."""
    table = torch.full((61, 61), -9.0)
    table[torch.arange(61), (torch.arange(61) + 1) % 61] = 9.0
    accepted = []
    for drafter in (Jacobi(), Lookahead()):
        ensemble = SpeculativeEnsemble([Bigram(table)], draft_lens=4, schedule="fixed", drafter=drafter)
        result = ensemble.generate([0], max_new_tokens=200, sampling=GREEDY)
        assert result.tokens == [(1 + index) % 61 for index in range(200)]
        accepted.append(result.statistics.accepted[OUTSIDE])
    assert accepted[0] == 0
    assert accepted[1] > 100


def test_heads_that_know_the_distribution_are_always_right():
    row = torch.randn(61, generator=torch.Generator().manual_seed(0))
    heads = Heads(lambda hidden: torch.stack([hidden, hidden], 1))
    ensemble = SpeculativeEnsemble([HeadedBigram(row.repeat(61, 1))], None, None, 5, "fixed", drafter=heads)
    result = ensemble.generate(PROMPT, max_new_tokens=31, seed=0)
    assert [event.kind for event in result.events] == ["standard"] + ["draft accepted", "draft accepted", "bonus"] * 10
    assert result.statistics.rounds == result.statistics.forwards[0] == 11


def test_a_draft_model_with_another_tokenizer_is_refused(pair, tmp_path):
    pair[1].save_pretrained(tmp_path)
    tiny_tokenizer(vocab=50).save_pretrained(tmp_path)
    drafter = DraftModel(tmp_path, dtype=torch.float32)
    with pytest.raises(ValueError, match="drafter: the tokenizer of the DraftModel differs"):
        SpeculativeEnsemble(pair, tiny_tokenizer(), schedule="fixed", drafter=drafter)
    ensemble = SpeculativeEnsemble(pair, schedule="fixed", drafter=drafter)  # ids only: nothing to compare
    twin = SpeculativeEnsemble(pair, schedule="fixed", drafter=DraftModel(load_model(tmp_path)))
    settings = {"max_new_tokens": 12, "seed": 2}
    assert ensemble.generate(PROMPT, **settings).tokens == twin.generate(PROMPT, **settings).tokens


@pytest.mark.parametrize("kind", ["mamba", "gated_delta"])
def test_recurrent_draft_models_take_back_what_was_rejected(kind):
    first = tiny_model(kind)
    ensemble = SpeculativeEnsemble(
        [first], draft_lens=3, schedule="fixed", drafter=DraftModel(relative_of(first, 1, 0.2))
    )
    expected = SpeculativeEnsemble([first], schedule="standard").generate(PROMPT, max_new_tokens=24, sampling=GREEDY)
    result = ensemble.generate(PROMPT, max_new_tokens=24, sampling=GREEDY)
    assert result.tokens == expected.tokens
    assert result.statistics.recovered > 0


def test_members_that_share_weights_are_read_in_one_forward_whoever_drafts(pair):
    model = pair[0]
    target, prompts = LogitMixture((1.5, -0.5)), MemberPrompts([[5, 3, 8, 1], [2, 2]])
    settings = {"max_new_tokens": 24, "sampling": GREEDY}
    expected = SpeculativeEnsemble([model, model], None, target, schedule="standard").generate(prompts, **settings)
    heads = Heads(lambda hidden: torch.stack([model.lm_head(hidden)] * 2, 1), index=1)
    for drafter in (PromptLookup(), LayerSkip([2], index=1), heads, Jacobi(1)):
        ensemble = SpeculativeEnsemble([model, model], None, target, 3, "fixed", drafter=drafter)
        for text in (ensemble.generate(prompts, **settings), *ensemble.generate_many([prompts] * 2, **settings)):
            assert text.tokens == expected.tokens
            rounds = text.statistics.rounds
            assert text.statistics.forwards == [rounds, rounds]
            assert text.statistics.model_calls == rounds + text.statistics.drafter_forwards


def test_an_adapter_drafts_with_its_member_where_layers_are_skipped(pair):
    """The member's own layers, all of them but the last, which does nothing: every draft is accepted."""
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    member = get_peft_model(relative_of(pair[0], 1, noise=0.0), config)
    last = member.get_base_model().model.layers[2]
    for part in (last.self_attn.o_proj, last.mlp.down_proj):
        part.weight.data.zero_()
    for drafter in (LayerSkip([2]), LayerSkip(exit_layer=2)):
        ensemble = SpeculativeEnsemble([member], draft_lens=3, schedule="fixed", drafter=drafter)
        assert ensemble.generate(PROMPT, max_new_tokens=24, seed=1).statistics.acceptance_rate == 1.0
