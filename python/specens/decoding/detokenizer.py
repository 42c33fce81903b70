"""The text of tokens that come one by one, whatever the tokenizer's decoder does with those beside them."""

from __future__ import annotations

import codecs
import itertools
import re
from typing import Any

REPLACEMENT = "\ufffd"  # in place of bytes that are no character
CONTEXT = 6  # tokens in front of new ones: more than a character has bytes
MOST = 2 * CONTEXT
HARD_LIMIT = 4 * CONTEXT  # of tokens that show nothing
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
IS_NOTHING, IS_TEXT = -2, -1  # kinds of tokens, beside the values of bytes
BROKEN_TAIL = 3  # characters at the end of broken bytes that a decoder may still join
CORE = 4  # bytes up to one that breaks a character
CLEAN_UP = (  # of transformers' clean_up_tokenization, one after the other
    *((f" {sign}", sign) for sign in ".?!,"),
    (" ' ", "'"),
    *((f" {ending}", ending) for ending in ("n't", "'m", "'s", "'ve", "'re")),
)
FORCED_CLEAN_UP = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"


class Replace:
    """`str.replace` on text that comes in pieces."""

    def __init__(self, old: str, new: str) -> None:
        self._old, self._new, self._held = old, new, ""

    def push(self, text: str) -> str:
        """What is certain of the replaced text."""
        *done, last = (self._held + text).split(self._old)
        lengths = range(min(len(self._old) - 1, len(last)), 0, -1)
        held = next((length for length in lengths if self._old.startswith(last[-length:])), 0)
        self._held = last[len(last) - held :]
        return self._new.join([*done, last[: len(last) - held]])

    def rest(self, text: str) -> str:
        """The replaced text after that, if `text` is the last piece."""
        return (self._held + text).replace(self._old, self._new)


class ByteRun:
    """Consecutive byte tokens, which some decoders show as characters only if all of them are valid together.

    has_text: whether some of its characters are complete. core: tokens that no character has; empty as long as all
    bytes may be valid.
    """

    def __init__(self) -> None:
        self.has_text = False
        self.core: list[int] = []
        self._tokens: list[int] = []
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def push(self, token: int, byte: int) -> str:
        """The characters that this byte completes."""
        self._tokens = [*self._tokens[1 - CORE :], token]
        if self.core:
            return ""
        try:
            return self._decoder.decode(bytes([byte]))
        except UnicodeDecodeError:
            self.core = self._tokens
            return ""


class Detokenizer:
    """The pieces that it gives, with `rest` after the last one, join to the decode of all tokens.

    Every token is decoded with a bounded number of others, so that the time is linear. Bytes that are no character
    become visible with the next token. Tokenizers written in Python may show a token otherwise when another one comes
    after it (subwords that end in "@@"): what stays as it is in front of a word is certain.

    tokenizer: of transformers, or anything with its `decode`. rest: text after the last piece that further tokens may
        change: a character without all its bytes, bytes that may turn out to be none, what a clean-up may still join.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        self.rest = ""
        self._tokenizer = tokenizer
        self._skips = skip_special_tokens
        self._word = [] if getattr(tokenizer, "is_fast", True) else self._find_word()
        self._kinds: dict[int, int] = {}
        self._window: list[int] = []  # the last tokens
        self._text = ""  # theirs
        self._num_final = 0  # how many of its characters were handed out
        self._run: ByteRun | None = None
        self._clean_up = [Replace(old, new) for old, new in CLEAN_UP] if cleans_up(tokenizer) else []

    def push(self, token: int) -> str:
        """The text that is certain now, after the pieces before."""
        kind = self._kind(token)
        if kind == IS_NOTHING:
            return ""
        self._window.append(token)
        piece = self._push_text() if kind == IS_TEXT else self._push_byte(token, kind)
        if len(self._window) > MOST and (self._run is None or self._run.core):
            self._shorten()
        rest = self._text[self._num_final :]
        for replace in self._clean_up:
            piece, rest = replace.push(piece), replace.rest(rest)
        self.rest = rest
        return piece

    def finish(self) -> str:
        """`rest`, with bytes that are no whole character."""
        rest = self._decode(self._window)[self._num_final :]
        for replace in self._clean_up:
            rest = replace.rest(rest)
        return rest

    def _push_text(self) -> str:
        self._run, self._text = None, self._decode(self._window)
        certain = self._text.removesuffix(REPLACEMENT)
        if self._word:
            before_word = self._decode(self._window + self._word)
            return self._hand_out(sum(itertools.accumulate(map(str.__eq__, certain, before_word), min)))
        return self._hand_out(len(certain))

    def _push_byte(self, token: int, byte: int) -> str:
        piece = ""
        if self._run is None:  # what stands before is certain now
            self._run, piece = ByteRun(), self._hand_out(len(self._text))
        complete = self._run.push(token, byte)
        if self._run.core:
            self._text = self._decode(self._window)
            tail = self._text[-BROKEN_TAIL:]
            return piece + self._hand_out(len(self._text) - len(tail) + len(tail.rstrip(REPLACEMENT)))
        if complete:  # decoded once, as a decoder may strip the first character
            self._text = self._text + complete if self._run.has_text else self._decode(self._window)
            self._run.has_text = True
        return piece

    def _hand_out(self, end: int) -> str:
        """The characters of the window's text up to there that are new."""
        piece, self._num_final = self._text[self._num_final : end], max(end, self._num_final)
        return piece

    def _shorten(self) -> None:
        """Go on with the last tokens only, if they end with the same text after some that was handed out."""
        rest = self._text[self._num_final :]
        window = (self._run.core if self._run else []) + self._window[-CONTEXT:]
        text = self._decode(window)
        if (len(text) > len(rest) and text.endswith(rest)) or len(self._window) > HARD_LIMIT:
            self._window, self._text, self._num_final = window, text, max(len(text) - len(rest), 0)

    def _kind(self, token: int) -> int:
        if token not in self._kinds:
            self._kinds[token] = self._find_kind(token)
        return self._kinds[token]

    def _find_kind(self, token: int) -> int:
        name_of = getattr(self._tokenizer, "convert_ids_to_tokens", None)
        try:
            name = "" if name_of is None else name_of(token)
            alone = self._decode([token])
        except (ValueError, TypeError, LookupError, OverflowError):  # an id that only the model has
            return IS_NOTHING
        if name is None or (self._skips and not alone and self._decode([token], keep_special=True)):
            return IS_NOTHING
        byte = BYTE.fullmatch(name)
        return int(byte[1], 16) if byte and alone != name else IS_TEXT

    def _find_word(self) -> list[int]:
        """Any token that shows letters only."""
        ids = range(len(self._tokenizer))
        return next(([token] for token in ids if self._decode([token]).isalpha()), [])

    def _decode(self, tokens: list[int], *, keep_special: bool = False) -> str:
        skips = self._skips and not keep_special
        return self._tokenizer.decode(tokens, skip_special_tokens=skips, clean_up_tokenization_spaces=False)


def cleans_up(tokenizer: Any) -> bool:
    """Whether the tokenizer's own `decode` takes spaces away before punctuation; newer transformers never for BPE."""
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    return type(model).__name__ != "BPE" or bool(getattr(tokenizer, FORCED_CLEAN_UP, True))


def text_of(tokenizer: Any, tokens: list[int]) -> str:
    """The text of a few tokens, special ones included; of ids that the tokenizer does not know, none."""
    whole = Detokenizer(tokenizer, skip_special_tokens=False)
    return "".join(map(whole.push, tokens)) + whole.finish()
