"""Text that grows token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNFINISHED = "\ufffd"


class TextStream:
    """Decodes tokens as they come; the pieces joined are the text of all tokens, up to the first stop string.

    A character whose bytes are spread over several tokens appears with the last of them, and text that a stop string
    may begin with once it is clear that it does not. Special tokens show no text.
    tokenizer: anything with the `decode` of Hugging Face tokenizers, or None: every piece is empty.
    stopped: whether a stop string has come; it may lie across the borders of tokens, and is not part of the text.
    """

    def __init__(self, tokenizer: Any | None, stop_strings: Sequence[str] = ()) -> None:
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop_strings = stop_strings
        self._shown: list[int] = []  # the tokens of the last piece: decoders look at what stands before
        self._held: list[int] = []
        self._text = ""  # decoded, and held back for the sake of stop strings

    def push(self, token: int) -> str:
        """The text that this token completes."""
        self._held.append(token)
        text = self._held_text()
        return "" if text.endswith(UNFINISHED) else self._release(text)

    def finish(self) -> str:
        """The text still held back; bytes that no token completed become replacement characters."""
        if self.stopped:
            return ""
        text = self._release(self._held_text()) if self._held else ""
        left, self._text = self._text, ""
        return text + left

    def _held_text(self) -> str:
        return self._decode(self._shown + self._held)[len(self._decode(self._shown)) :]

    def _release(self, text: str) -> str:
        """What of the text up to here can be shown."""
        self._shown, self._held = self._held, []
        text = self._text + text
        ends = [place for stop in self._stop_strings if (place := text.find(stop)) >= 0]
        self.stopped = bool(ends)
        shown = min(ends) if ends else len(text) - self._num_open(text)
        self._text = "" if ends else text[shown:]
        return text[:shown]

    def _num_open(self, text: str) -> int:
        """The length of the longest end of the text that a stop string begins with."""
        most = max(map(len, self._stop_strings), default=1) - 1
        lengths = range(min(most, len(text)), 0, -1)
        return next((n for n in lengths if any(stop.startswith(text[-n:]) for stop in self._stop_strings)), 0)

    def _decode(self, tokens: list[int]) -> str:
        if self._tokenizer is None or not tokens:
            return ""
        return self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
