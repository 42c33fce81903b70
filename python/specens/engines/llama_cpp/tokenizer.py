"""The tokenizer that a GGUF file carries, as far as the driver asks one of transformers."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from specens.engines.llama_cpp.model import GGUFModel

NONE = -1  # llama.cpp's id where there is no such token


class GGUFTokenizer:
    """Text to token ids and back, by llama.cpp; ids and special tokens are those of the model's file.

    chat_template: of the file's metadata, in Jinja, or None.
    """

    def __init__(self, model: GGUFModel) -> None:
        self._model = model  # which the vocabulary lives in
        self._functions, self._vocab = model.functions, model.vocab
        self.chat_template: str | None = model.metadata.get("tokenizer.chat_template")

    def __len__(self) -> int:
        return self._model.num_tokens

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """The ids of a text, special tokens in it read as such; with those that the model wants around a text."""
        data = text.encode()
        count = -self._functions.llama_tokenize(self._vocab, data, len(data), None, 0, add_special_tokens, True)
        ids = (ctypes.c_int32 * max(count, 0))()
        self._functions.llama_tokenize(self._vocab, data, len(data), ids, len(ids), add_special_tokens, True)
        return {"input_ids": list(ids)}

    def decode(
        self,
        token_ids: int | Sequence[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:
        """The text of token ids; bytes that are no character are shown as replacement characters.

        Raises ValueError for an id that is not in the vocabulary, and where spaces should be taken away.
        """
        if clean_up_tokenization_spaces:
            raise ValueError("clean_up_tokenization_spaces: expected False, as llama.cpp leaves spaces as they are")
        tokens = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        for token in tokens:
            if not 0 <= token < len(self):
                raise ValueError(f"token_ids: expected ids from 0 to {len(self) - 1}, got {token}")
        ids, buffer = (ctypes.c_int32 * len(tokens))(*tokens), ctypes.create_string_buffer(16 * len(tokens) + 16)
        where = (self._vocab, ids, len(tokens))
        length = self._functions.llama_detokenize(*where, buffer, len(buffer), False, not skip_special_tokens)
        if length < 0:
            buffer = ctypes.create_string_buffer(-length)
            length = self._functions.llama_detokenize(*where, buffer, len(buffer), False, not skip_special_tokens)
        return buffer.raw[:length].decode(errors="replace")

    def get_vocab(self) -> dict[str, int]:
        """The id of each token by its text, as its file has it."""
        return self._ids

    @cached_property
    def _ids(self) -> dict[str, int]:
        text = self._functions.llama_vocab_get_text
        return {text(self._vocab, token).decode(errors="replace"): token for token in range(len(self))}

    @cached_property
    def eos_token_id(self) -> int | None:
        """The id that ends a sequence."""
        return self._id(self._functions.llama_vocab_eos)

    @cached_property
    def bos_token_id(self) -> int | None:
        """The id that begins one."""
        return self._id(self._functions.llama_vocab_bos)

    def _id(self, function: Any) -> int | None:
        token = function(self._vocab)
        return None if token == NONE else token

    def apply_chat_template(
        self, conversation: Iterable[Mapping[str, Any]], add_generation_prompt: bool = False, tokenize: bool = True
    ) -> str | list[int]:
        """A conversation as the model was trained on it. Raises ValueError where its file has no template."""
        from transformers.utils.chat_template_utils import render_jinja_template

        if self.chat_template is None:
            raise ValueError(f"chat: expected a chat template in {self._model.path.name}, got none")
        tokens = {"bos_token": self.bos_token_id, "eos_token": self.eos_token_id}
        (text,), _ = render_jinja_template(
            conversations=[list(conversation)],
            chat_template=self.chat_template,
            add_generation_prompt=add_generation_prompt,
            **{name: "" if token is None else self.decode([token]) for name, token in tokens.items()},
        )
        return self(text, add_special_tokens=False)["input_ids"] if tokenize else text
