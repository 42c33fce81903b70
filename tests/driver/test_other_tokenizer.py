"""A draft model with a tokenizer of its own: lossless drafts by text, and CoSD across tokenizers."""

import copy
import itertools

import pytest
import torch
from driver.kinds_of_tokenizers import tokenizer_of
from driver.test_rules_of_chains import ASSISTED, by_hand
from driver.test_schedules import GREEDY
from driver.tiny_models import PROMPT, Bigram, relative_of, tiny_llama
from specens import SpeculativeEnsemble
from specens.drafters import OtherTokenizer
from specens.drafters.other_tokenizer import _joined
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from specens_kernels import Replacement

LETTERS = [chr(code) for code in range(ord("A"), ord("A") + 61)]  # one for each id of the tiny models


def tokenizer(order, merges=(), **special):
    """Letters numbered in some order, and pairs of them that are one token after these."""
    vocab = {letter: number for number, letter in enumerate([*order, *("".join(pair) for pair in merges)])}
    made = Tokenizer(models.BPE(vocab, list(merges)))
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


@pytest.fixture(scope="module")
def pair():
    first = tiny_llama(0)
    return [first, relative_of(first, 1, noise=0.2)]


def renumbered(model, order):
    """The same model for letters in another order."""
    ids = torch.tensor([LETTERS.index(letter) for letter in order])
    other = copy.deepcopy(model)
    other.model.embed_tokens.weight.data = model.model.embed_tokens.weight.data[ids]
    other.lm_head.weight.data = model.lm_head.weight.data[ids]
    return other


def with_drafter(members, drafter, **settings):
    arguments = {"schedule": "fixed", "draft_lens": 4, "drafter": drafter} | settings
    return SpeculativeEnsemble(members, tokenizer(LETTERS), **arguments)


def test_drafts_of_the_same_model_under_other_numbers_are_all_accepted(pair):
    order = LETTERS[::-1]
    ensemble = with_drafter(pair[:1], OtherTokenizer(renumbered(pair[0], order), tokenizer(order)))
    expected = SpeculativeEnsemble(pair[:1], schedule="standard").generate(PROMPT, max_new_tokens=40, sampling=GREEDY)
    result = ensemble.generate(PROMPT, max_new_tokens=40, sampling=GREEDY)
    assert result.tokens == expected.tokens
    assert result.statistics.acceptance_rate == 1.0
    many = ensemble.generate_many([PROMPT] * 3, batch_size=2, max_new_tokens=40, sampling=GREEDY)
    assert [text.tokens for text in many] == [expected.tokens] * 3


def test_drafts_of_a_coarser_tokenizer_keep_the_text(pair):
    expected = SpeculativeEnsemble(pair[:1], schedule="standard").generate(PROMPT, max_new_tokens=60, sampling=GREEDY)
    text = [LETTERS[token] for token in expected.tokens]
    merges = list(dict.fromkeys(zip(text[:-1:2], text[1::2], strict=False)))[:8]
    coarse = tokenizer(LETTERS, merges)
    drafter = tiny_llama(5, vocab=61 + len(merges))
    ensemble = with_drafter(pair[:1], OtherTokenizer(drafter, coarse))
    result = ensemble.generate(PROMPT, max_new_tokens=60, sampling=GREEDY)
    assert result.tokens == expected.tokens
    assert sum(result.statistics.drafted) > sum(result.statistics.tested) > 0
    sampled = [ensemble.generate(PROMPT, max_new_tokens=30, seed=4).tokens for _ in range(2)]
    assert sampled[0] == sampled[1]


@torch.inference_mode()
def test_collaborative_decoding_across_tokenizers_is_that_of_one_tokenizer(pair):
    order = LETTERS[30:] + LETTERS[:30]
    drafter = OtherTokenizer(renumbered(pair[0], order), tokenizer(order), probabilities=True)
    ensemble = with_drafter(pair[1:], drafter, rule=Replacement(0.5, 0.5))
    result = ensemble.generate(PROMPT, max_new_tokens=50, sampling=GREEDY)
    assert result.tokens == by_hand(pair, lambda own, assistant: own < 0.5 and assistant > 0.5 * own, 50, 4)
    assert result.statistics.recovered > 0
    members = SpeculativeEnsemble(
        pair, ensemble=ASSISTED, schedule="fixed", draft_lens=4, rule=Replacement(0.5, 0.5)
    ).generate(PROMPT, max_new_tokens=50, sampling=GREEDY)
    assert members.tokens == result.tokens


def test_the_end_of_a_draft_is_the_end_of_the_text(pair):
    order = LETTERS[::-1]
    free = SpeculativeEnsemble(pair[:1], schedule="standard").generate(PROMPT, max_new_tokens=40, sampling=GREEDY)
    end = LETTERS[free.tokens[9]]
    drafter = OtherTokenizer(renumbered(pair[0], order), tokenizer(order, eos_token=end))
    ensemble = SpeculativeEnsemble(
        pair[:1], tokenizer(LETTERS, eos_token=end), schedule="fixed", draft_lens=4, drafter=drafter
    )
    result = ensemble.generate(PROMPT, max_new_tokens=40, sampling=GREEDY)
    assert result.tokens == free.tokens[: free.tokens.index(free.tokens[9]) + 1]
    assert result.finish_reason == "stop"


def writer(tokenizer, seed):
    """A Bigram over a tokenizer's ids that writes any of those that show ASCII text or whole words."""
    size = len(tokenizer)
    shown = torch.tensor([tokenizer.decode([token]).strip().isalpha() for token in range(size)])
    table = 6 * torch.randn(size, size, generator=torch.Generator().manual_seed(seed))
    return Bigram(table.masked_fill(~shown, float("-inf")))


@pytest.mark.parametrize("members", ["byte-level", "llama", "gemma", "unigram"])
def test_a_draft_becomes_tokens_that_show_just_its_text_where_it_stands(pair, members):
    """In the middle of a word, where some tokenizers would put a space; half a character at the end waits."""
    theirs, ours = tokenizer_of(members), tokenizer_of("slow bytes")
    drafter = OtherTokenizer(pair[0], ours).bind([], theirs)
    for before, text in itertools.product(
        ("a", "the's ", "", "a\n"), ("b", "b the", " the", "\na.b", "\u00e9", "th ab c")
    ):
        ids = theirs(before)["input_ids"]
        ids = ids[:-1] if ids[-1:] == [theirs.eos_token_id] else ids
        drafts = [*ours(text, add_special_tokens=False)["input_ids"], 0xC3 + 3]
        tokens = [token for token, _ in drafter._tokens_of_members(ids, [0], drafts, [0.5] * len(drafts))]
        whole = theirs.decode([*ids, *tokens], skip_special_tokens=True)
        said = theirs.decode(ids, skip_special_tokens=True) + text
        can_say = theirs.decode(theirs(said)["input_ids"], skip_special_tokens=True) == said
        assert whole == said or not (tokens or can_say), (before, text)


@pytest.mark.parametrize("own", ["byte-level", "llama", "unigram", "words", "slow bytes"])
def test_a_prompt_that_shows_no_text_is_read_through_another_tokenizer(own):
    theirs, ours = tokenizer_of("llama"), tokenizer_of(own)
    models = [writer(theirs, 2)], theirs
    expected = SpeculativeEnsemble(*models, schedule="standard").generate([1], max_new_tokens=8, sampling=GREEDY)
    drafter = OtherTokenizer(writer(ours, 1), ours)
    ensemble = SpeculativeEnsemble(*models, schedule="fixed", draft_lens=3, drafter=drafter)
    assert ensemble.generate([1], max_new_tokens=8, sampling=GREEDY).tokens == expected.tokens


@pytest.mark.parametrize("probabilities", [False, True])
def test_a_drafter_without_drafts_lets_the_text_go_on(pair, probabilities):
    """Its own end is no token of the members', its positions end, and its text is none that they can say."""
    rule = Replacement() if probabilities else "token"
    silent = tokenizer(LETTERS, eos_token="A", bos_token=None)
    model = tiny_llama(3, max_position_embeddings=12)
    model.lm_head.weight.data[1:] = 0.0
    for own in (silent, tokenizer(["\u00e9", *LETTERS[1:]])):
        drafter = OtherTokenizer(model, own, probabilities=probabilities)
        result = with_drafter(pair[:1], drafter, rule=rule).generate(PROMPT, max_new_tokens=20, sampling=GREEDY)
        assert len(result.tokens) == 20


def test_a_text_is_read_without_the_end_that_a_tokenizer_puts_behind_it(pair):
    drafter = OtherTokenizer(pair[0], tokenizer_of("unigram"))
    tokens = tokenizer_of("unigram").convert_tokens_to_ids
    assert drafter._ids_to_read("a the") == tokens(["▁a", "▁the"])
    assert drafter._ids_to_read("") == tokens(["</s>"])


def test_probabilities_go_to_the_tokens_in_which_the_drafts_begin():
    assert _joined([0, 2], [0.5, 0.4], [0, 1, 2]) == [0.5, 1.0, 0.4]
    assert _joined([0, 1, 2], [0.5, 0.5, 0.5], [0]) == [0.125]
    assert _joined([0, 3], [0.5, 0.25], [0, 2]) == [0.5, 0.25]
    assert _joined([], [], []) == []


def test_wrong_settings_are_named(pair):
    with pytest.raises(ValueError, match="tokenizer: expected the tokenizer of the draft model, got None"):
        OtherTokenizer(pair[0])
    drafter = OtherTokenizer(pair[0], tokenizer(LETTERS))
    with pytest.raises(ValueError, match="tokenizer: expected the ensemble's tokenizer"):
        SpeculativeEnsemble(pair[:1], schedule="fixed", drafter=drafter)
    with pytest.raises(ValueError, match="rule: expected a drafter whose tokens have a probability"):
        with_drafter(pair[:1], drafter, rule=Replacement())
    estimating = OtherTokenizer(pair[0], tokenizer(LETTERS), probabilities=True)
    with pytest.raises(ValueError, match="rule: expected Replacement or DecisionTree with a drafter that estimates"):
        with_drafter(pair[:1], estimating)
