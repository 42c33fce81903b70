"""Text that grows token by token, for tokenizers of each kind and any tokens."""

import itertools

import pytest
from driver.kinds_of_tokenizers import KINDS, tokenizer_of
from hypothesis import given, settings
from hypothesis import strategies as st
from specens.decoding.detokenizer import CLEAN_UP, Replace, text_of
from specens.decoding.text_stream import TextStream
from transformers import PreTrainedTokenizerBase


def ids(kind):
    """Sequences of few different tokens, so that they meet in many ways; of ids that only the model has, too."""
    tokenizer = tokenizer_of(kind)
    some = st.integers(0, len(tokenizer) - 1 + 3 * tokenizer.is_fast)
    return st.lists(some, min_size=1, max_size=12).flatmap(lambda few: st.lists(st.sampled_from(few), max_size=50))


def by_kind(test):
    return pytest.mark.parametrize("kind", KINDS)(settings(max_examples=60, deadline=None)(given(st.data())(test)))


@by_kind
def test_the_pieces_join_to_the_decode_of_the_whole(kind, data):
    tokenizer, tokens = tokenizer_of(kind), data.draw(ids(kind))
    for skip in (True, False):
        stream = TextStream(tokenizer, skip_special_tokens=skip)
        pieces = [stream.push(token) for token in tokens]
        assert "".join(pieces) + stream.finish() == tokenizer.decode(tokens, skip_special_tokens=skip)
        assert stream.finish() == ""


def ends_first(tokenizer, tokens, stop):
    """By decoding every beginning: how many tokens there are when a stop string has come; None if it never comes."""
    for count in range(1, len(tokens) + 1):
        texts = [tokenizer.decode(tokens[:count], skip_special_tokens=skip) for skip in (True, False)]
        if any(stop in text for text in texts):
            return count
    return None


@by_kind
def test_stop_strings_end_the_text_wherever_they_end(kind, data):
    tokenizer, tokens = tokenizer_of(kind), data.draw(ids(kind).filter(bool))
    whole = tokenizer.decode(tokens, skip_special_tokens=False).strip("\ufffd") or "x"
    first, last = sorted(data.draw(st.tuples(*[st.integers(0, len(whole) - 1)] * 2)))
    stop = whole[first : min(last + 1, first + 12)]
    if "\ufffd" in stop:  # stands for bytes that may still become a character
        return
    count = ends_first(tokenizer, tokens, stop)
    stream, pieces = TextStream(tokenizer, ["never comes", stop]), []
    for token in tokens:
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    text = "".join(pieces) + stream.finish()
    if count is None:
        assert not stream.stopped
        assert text == tokenizer.decode(tokens, skip_special_tokens=True)
        return
    assert stream.stopped
    assert len(pieces) == count
    shown = tokenizer.decode(tokens[:count], skip_special_tokens=True)
    if stop in shown:
        assert text == shown[: shown.index(stop)]
    else:  # it lies in special tokens, at least in part: nothing of what stands in front of it is missing
        hidden = tokenizer.decode(tokens[:count], skip_special_tokens=False)
        before = hidden[: hidden.index(stop)]
        lengths = [len(tokenizer.decode(tokens[:n], skip_special_tokens=False)) for n in range(count + 1)]
        full = max(n for n in range(count + 1) if lengths[n] <= len(before))
        assert shown.startswith(text)
        certain = tokenizer.decode(tokens[:full], skip_special_tokens=True).rstrip(" \ufffd")
        assert text.startswith(certain) or not shown.startswith(certain)


class Counting:
    """Counts the tokens that are decoded."""

    def __init__(self, tokenizer):
        self._tokenizer, self.num_decoded = tokenizer, 0

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def __len__(self):
        return len(self._tokenizer)

    def decode(self, tokens, **settings):
        self.num_decoded += len(tokens)
        return self._tokenizer.decode(tokens, **settings)


@pytest.mark.parametrize("kind", KINDS)
def test_the_time_is_linear_in_the_length(kind):
    """Whatever comes again and again: each token and byte, special and unknown ones, characters, half ones."""
    tokenizer = tokenizer_of(kind)
    text = tokenizer("好é the's ab c\u00e9", add_special_tokens=False)["input_ids"]
    repeated = [[token] for token in range(0, len(tokenizer) + 3 * tokenizer.is_fast, 7)] + [text, text[:-1], text[:2]]
    for few in filter(None, repeated):
        tokens = list(itertools.islice(itertools.cycle(few), 150))
        counting = Counting(tokenizer)
        stream = TextStream(counting, ["absent"])
        pieces = [stream.push(token) for token in tokens]
        assert counting.num_decoded <= 80 * len(tokens) + 2 * len(tokenizer)
        whole = tokenizer.decode(tokens, skip_special_tokens=True)
        is_open = "llama" in kind or kind == "gemma"  # a long run of bytes is shown once all of them are valid
        if not is_open or "\ufffd" in whole:
            assert len("".join(pieces)) >= len(whole) - 12
        assert "".join(pieces) + stream.finish() == whole


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text(" '.?!,ntmsvre"), max_size=30))
def test_clean_up_in_pieces_is_that_of_transformers(pieces):
    text, joined = "".join(pieces), ""
    stages = [Replace(old, new) for old, new in CLEAN_UP]
    for piece in pieces:
        rest = ""
        for stage in stages:
            piece, rest = stage.push(piece), stage.rest(rest)
        joined += piece
        assert PreTrainedTokenizerBase.clean_up_tokenization(None, text).startswith(joined)
    if pieces:
        assert joined + rest == PreTrainedTokenizerBase.clean_up_tokenization(None, text)


def test_characters_appear_with_their_last_byte():
    tokenizer = tokenizer_of("byte-level")
    for text in ("plain", "a\u00e4b\u20ac \U0001f600!", "\U0001f600\U0001f600"):
        stream = TextStream(tokenizer)
        pieces = [stream.push(token) for token in tokenizer(text)["input_ids"]]
        assert "".join(pieces) == text
        assert "\ufffd" not in "".join(pieces)


def test_stop_strings_count_with_the_token_that_completes_them():
    tokenizer = tokenizer_of("llama")
    newline, a = tokenizer.convert_tokens_to_ids(["<0x0A>", "▁a"])
    stream = TextStream(tokenizer, ["\n"])
    assert [stream.push(a), stream.push(newline)] == ["a", ""]
    assert stream.stopped
    stream = TextStream(tokenizer, ["\n"])
    assert stream.push(newline, may_stop=False) == ""
    assert (stream.stopped, stream.push(a), stream.stopped) == (False, "\n a", False)


def test_a_stop_string_is_seen_in_and_across_special_tokens_that_are_not_shown():
    tokenizer = tokenizer_of("byte-level")
    tokens = tokenizer("a the<file_sep>the end")["input_ids"]
    for stop, text in (("<file_sep>", "a the"), ("e<file", "a th"), ("sep>th", "a the"), ("ethe", "a th")):
        stream = TextStream(tokenizer, [stop])
        pieces = []
        while not stream.stopped:
            pieces.append(stream.push(tokens[len(pieces)]))
        assert "".join(pieces) == text
    stream = TextStream(tokenizer, ["<file_sep>"], skip_special_tokens=False)
    assert "".join(map(stream.push, tokens)) == "a the"


def test_a_stop_string_that_ends_too_early_is_passed_over():
    tokenizer = tokenizer_of("byte-level")
    tokens = tokenizer("ab<file_sep>ab<file_sep>ab")["input_ids"]
    for stop, early, text in (("ab", 3, "ab"), ("<file_sep>", 3, "abab"), ("ba", 2, "a"), ("b", 2, "aba")):
        stream = TextStream(tokenizer, [stop])
        pieces = [stream.push(token, may_stop=index >= early) for index, token in enumerate(tokens)]
        assert ("".join(pieces), stream.stopped) == (text, True), stop


def test_ids_that_only_the_model_has_show_nothing():
    for kind in KINDS:
        tokenizer = tokenizer_of(kind)
        stream = TextStream(tokenizer, ["stop"])
        assert isinstance("".join(stream.push(len(tokenizer) + number) for number in range(300)), str)
        assert isinstance(text_of(tokenizer, [len(tokenizer) + 400]), str)


def test_without_a_tokenizer_there_is_no_text():
    stream = TextStream(None)
    assert stream.push(1) == stream.finish() == ""
