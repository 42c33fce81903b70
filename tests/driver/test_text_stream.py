"""Text that grows token by token."""

import pytest
from specens.text_stream import TextStream


class ByteTokenizer:
    """A token is a byte; 256 is special and shows nothing."""

    def decode(self, tokens, skip_special_tokens, clean_up_tokenization_spaces):
        assert skip_special_tokens
        assert not clean_up_tokenization_spaces
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")


class LeadingSpaceTokenizer:
    """Words with a space before each, which the decoder takes away at the beginning, as SentencePiece does."""

    def decode(self, tokens, skip_special_tokens, clean_up_tokenization_spaces):  # noqa: ARG002
        return "".join(f" word{token}" for token in tokens).removeprefix(" ")


@pytest.mark.parametrize("text", ["plain", "a\u00e4b\u20ac \U0001f600!", "\U0001f600\U0001f600", ""])
def test_characters_appear_with_their_last_byte(text):
    stream = TextStream(ByteTokenizer())
    pieces = [stream.push(byte) for byte in text.encode()]
    assert "".join(pieces) + stream.finish() == text
    assert "\ufffd" not in "".join(pieces)


def test_bytes_that_nothing_completes_come_at_the_end():
    stream = TextStream(ByteTokenizer())
    assert [stream.push(byte) for byte in b"a\xf0\x9f"] == ["a", "", ""]
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_special_tokens_show_nothing():
    stream = TextStream(ByteTokenizer())
    assert [stream.push(token) for token in (104, 256, 105)] == ["h", "", "i"]


def test_spaces_between_words_are_kept():
    stream = TextStream(LeadingSpaceTokenizer())
    assert [stream.push(token) for token in (1, 2, 3)] == ["word1", " word2", " word3"]


def test_without_a_tokenizer_there_is_no_text():
    stream = TextStream(None)
    assert stream.push(1) == stream.finish() == ""
