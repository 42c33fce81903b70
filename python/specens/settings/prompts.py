"""Prompts as a user writes them, turned into one list of token ids for each member."""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
EXPECTED = "text, token ids, chat messages (dicts with role and content), or MemberPrompts of these"


@dataclass(frozen=True, init=False)
class MemberPrompts:
    """A prompt for each member, in their order: the same question with and without its context, say.

    prompts: text, token ids or chat messages, one for each. Raises ValueError where they are no list.
    """

    prompts: tuple[Any, ...]

    def __init__(self, prompts: Sequence[Any]) -> None:
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise ValueError(f"prompts: expected a list with a prompt for each member, got {type(prompts).__name__}")
        object.__setattr__(self, "prompts", tuple(prompts))


def prompts_for_members(prompt: Any, num_members: int, tokenizer: Any | None, chat: bool) -> list[list[int]]:
    """Token ids of every member's prompt.

    prompt: text, token ids (ints or a one-dimensional tensor or array) or chat messages: the prompt of all members; or
        MemberPrompts. chat: put text through the tokenizer's chat template as a user's message.
    Raises ValueError where a prompt is none of these or empty, where the number of prompts is not that of the members,
        or where text comes without a tokenizer.
    """
    if isinstance(prompt, MemberPrompts):
        each = list(prompt.prompts)
    else:
        each = [prompt] * num_members if _is_one_prompt(prompt) else _former_list(prompt)
    if len(each) != num_members:
        raise ValueError(f"prompt: expected one prompt, or one for each of the {num_members} members; got {len(each)}")
    return [_token_ids(one, tokenizer, chat) for one in each]


def _is_one_prompt(prompt: Any) -> bool:
    if isinstance(prompt, (str, Tensor, np.ndarray)):
        return True
    if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray)):
        raise ValueError(f"prompt: expected {EXPECTED}; got {type(prompt).__name__}")
    return len(prompt) == 0 or isinstance(prompt[0], (numbers.Number, dict))


def _former_list(prompts: Sequence[Any]) -> list[Any]:
    """A list of prompts, which may mean two things: of texts it is refused, of token ids one for each member."""
    if any(isinstance(prompt, str) for prompt in prompts):
        raise ValueError(
            f"prompt: expected {EXPECTED}; got a list of {len(prompts)}. Several prompts are for generate_many; "
            "one for each member is MemberPrompts([...])"
        )
    warnings.warn(
        "prompt: a list with a prompt for each member is deprecated; write MemberPrompts([...])",
        FutureWarning,
        stacklevel=2,
    )
    return list(prompts)


def _token_ids(prompt: Any, tokenizer: Any | None, chat: bool) -> list[int]:
    if isinstance(prompt, np.ndarray):
        prompt = torch.as_tensor(prompt)
    if isinstance(prompt, Tensor):
        if prompt.dim() != 1 or prompt.dtype not in INTEGERS:
            raise ValueError(f"prompt: expected one-dimensional token ids, got {prompt.dtype} {list(prompt.shape)}")
        ids = prompt.tolist()
    elif isinstance(prompt, Sequence) and not isinstance(prompt, (str, bytes)) and all(map(_is_id, prompt)):
        ids = list(map(int, prompt))
    elif isinstance(prompt, str) or (isinstance(prompt, Sequence) and all(isinstance(one, dict) for one in prompt)):
        ids = _tokenize(prompt, tokenizer, chat)
    else:
        raise ValueError(f"prompt: expected {EXPECTED}; got {prompt!r}")
    if not ids:
        raise ValueError("prompt: expected at least one token, got none")
    if min(ids) < 0:
        raise ValueError(f"prompt: expected token ids >= 0, got {min(ids)}")
    return ids


def _is_id(one: Any) -> bool:
    return isinstance(one, numbers.Integral) and not isinstance(one, bool)


def _tokenize(prompt: str | Sequence[dict], tokenizer: Any | None, chat: bool) -> list[int]:
    if tokenizer is None:
        raise ValueError("prompt: text needs a tokenizer; pass tokenizer= to SpeculativeEnsemble, or give token ids")
    if isinstance(prompt, str) and not chat:
        return tokenizer(_unicode(prompt))["input_ids"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("chat: the tokenizer has no chat template; give plain text with chat=False")
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(_unicode(text), add_special_tokens=False)["input_ids"]


def _unicode(text: str) -> str:
    """The text, which no byte or escape has put half a character into. Raises ValueError naming it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        got = f"{text[error.start]!r} at {error.start}, which is a byte of another encoding or half a character"
        raise ValueError(f"prompt: expected Unicode text, got {got}") from None
    return text
