"""Text that grows token by token, and where it stops."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from specens.decoding.detokenizer import Detokenizer


class TextStream:
    """The pieces of a text as its tokens come; joined, they are the decode of all tokens, up to the first stop string.

    A character whose bytes are spread over several tokens appears with the last of them, and text that a stop string
    may begin with once it is clear that it does not. A stop string may lie across the borders of tokens, and in special
    tokens, in whole or in part, also where these are not shown. The text ends where it begins.

    tokenizer: anything with the `decode` of Hugging Face tokenizers, or None: every piece is empty.
    skip_special_tokens: whether special tokens show no text. stopped: whether a stop string has come.
    """

    def __init__(
        self, tokenizer: Any | None, stop_strings: Sequence[str] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self.stopped = False
        self._stops = StopStrings(stop_strings)
        self._shown = self._hidden = None
        if tokenizer is not None:
            self._shown = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        if tokenizer is not None and stop_strings and skip_special_tokens:
            self._hidden = HiddenText(tokenizer, self._stops)
        self._num_released = self._num_passed = 0  # a stop string must end after what is passed
        self._held = ""  # certain, and held back for the sake of stop strings

    def push(self, token: int, *, may_stop: bool = True) -> str:
        """The text that this token completes; after a stop string none. may_stop: whether one can end with it."""
        if self._shown is None or self.stopped:
            return ""
        self._held += self._shown.push(token)
        text = self._held + self._shown.rest
        ends = [self._stops.find(text, self._num_passed - self._num_released)]
        free = len(self._held) - self._stops.num_open(self._held)
        if self._hidden is not None:
            self._hidden.push(token, self._num_released + len(text), may_stop=may_stop)
            end, hidden_free = self._hidden.find(), self._hidden.free()
            ends.append(None if end is None else max(end - self._num_released, 0))
            free = max(min(free, hidden_free - self._num_released), 0)
        found = [end for end in ends if end is not None]
        if may_stop and found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        if not may_stop:
            self._num_passed = self._num_released + len(text)
        piece, self._held = self._held[:free], self._held[free:]
        self._num_released += len(piece)
        return piece

    def finish(self) -> str:
        """The text still held back; bytes that no token completed become replacement characters."""
        if self.stopped or self._shown is None:
            return ""
        text, self._shown, self._held = self._held + self._shown.finish(), None, ""
        return text


class StopStrings:
    """Texts that end another one."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._longest = max(map(len, self._strings), default=0)

    def find(self, text: str, passed: int = 0) -> int | None:
        """Where the first of them begins that ends after the first `passed` characters."""
        indices = (text.find(stop, max(passed - len(stop) + 1, 0)) for stop in self._strings)
        return min((index for index in indices if index >= 0), default=None)

    def num_open(self, text: str) -> int:
        """The length of the longest end of the text that one of them begins with, and goes on after."""
        lengths = range(min(self._longest - 1, len(text)), 0, -1)
        return next((n for n in lengths if any(stop.startswith(text[-n:]) for stop in self._strings)), 0)


class HiddenText:
    """A text with its special tokens, in which stop strings are looked for, beside the one that is shown without."""

    def __init__(self, tokenizer: Any, stops: StopStrings) -> None:
        self._stops = stops
        self._whole = Detokenizer(tokenizer, skip_special_tokens=False)
        self._start, self._text = 0, ""  # where the first character that a stop string may begin with stands
        self._num_passed = 0
        self._lengths = deque([(0, 0)])  # of both texts after each token from there on

    def push(self, token: int, num_shown: int, *, may_stop: bool) -> None:
        """Read a token. num_shown: the length of the text without special tokens."""
        self._text += self._whole.push(token)
        length = self._start + len(self._text) + len(self._whole.rest)
        self._lengths.append((length, num_shown))
        if not may_stop:
            self._num_passed = length

    def find(self) -> int | None:
        """Where the text that is shown ends, if a stop string has come."""
        index = self._stops.find(self._text + self._whole.rest, self._num_passed - self._start)
        return None if index is None else self._in_shown(self._start + index)

    def free(self) -> int:
        """The length of the text that is shown in front of what a stop string may begin with."""
        passed = len(self._text) - self._stops.num_open(self._text)
        self._start, self._text = self._start + passed, self._text[passed:]
        while len(self._lengths) > 1 and self._lengths[1][0] <= self._start:
            self._lengths.popleft()
        return self._in_shown(self._start)

    def _in_shown(self, index: int) -> int:
        """A place in the text as one in the text that is shown; what a token shows less is missing in front."""
        (whole, shown), *lengths = self._lengths
        for next_whole, next_shown in lengths:
            if index < next_whole:
                missing = (next_whole - whole) - (next_shown - shown)
                return min(shown + max(index - whole - missing, 0), next_shown)
            whole, shown = next_whole, next_shown
        return shown
