"""Text that grows token by token."""

from __future__ import annotations

from typing import Any

UNFINISHED = "\ufffd"


class TextStream:
    """Decodes tokens as they come; the pieces joined are the text of all tokens.

    A character whose bytes are spread over several tokens appears with the last of them. Special tokens show no text.
    tokenizer: anything with the `decode` of Hugging Face tokenizers, or None: every piece is empty.
    """

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._shown: list[int] = []  # the tokens of the last piece: decoders look at what stands before
        self._held: list[int] = []

    def push(self, token: int) -> str:
        """The text that this token completes."""
        self._held.append(token)
        text = self._held_text()
        if text.endswith(UNFINISHED):
            return ""
        return self._release(text)

    def finish(self) -> str:
        """The text still held back: bytes that no token completed, as replacement characters."""
        return self._release(self._held_text()) if self._held else ""

    def _held_text(self) -> str:
        return self._decode(self._shown + self._held)[len(self._decode(self._shown)) :]

    def _release(self, text: str) -> str:
        self._shown, self._held = self._held, []
        return text

    def _decode(self, tokens: list[int]) -> str:
        if self._tokenizer is None or not tokens:
            return ""
        return self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
