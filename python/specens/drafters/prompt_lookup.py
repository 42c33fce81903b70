"""What followed the last tokens when they occurred before.

Sources: Saxena, Prompt Lookup Decoding, 2023; He et al., REST, NAACL 2024 (a datastore of other texts).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from specens.decoding.request import Request
from specens.drafters.drafter import Drafter, add_chosen, check_count
from specens.drafters.trees import paths_of
from specens.engines.protocol import Engine
from specens_kernels import NgramIndex

if TYPE_CHECKING:
    from specens.decoding.batch import Batch

CHOICES = ("recent", "frequent")


class PromptLookup(Drafter):
    """Drafts what followed the longest n-gram that the text ends with, in the prompt, in the text or in a store.

    It costs microseconds, so it pays where texts repeat: editing, code, retrieval, chats about a document. The prompt
    is member 0's. A round in which nothing is found emits one token.

    max_match: the longest n-gram looked for. min_match: a shorter one gives no draft. store: texts, as strings or token
        ids, or an NgramIndex over them, which all requests share; it drafts where it knows a longer n-gram.
    choose: "recent" or "frequent", which of the tokens that followed is taken. A tree holds all of them, as far as they
        fit, the most frequent first; after the most recent, where that is chosen.
    Raises ValueError where one is out of range, or where a text needs a tokenizer and the ensemble has none.
    """

    def __init__(
        self,
        max_match: int = 16,
        min_match: int = 1,
        store: NgramIndex | Sequence[str | Sequence[int]] | None = None,
        choose: str = "recent",
    ) -> None:
        check_count("max_match", max_match)
        check_count("min_match", min_match)
        if min_match > max_match:
            raise ValueError(f"min_match: expected at most max_match, {max_match}; got {min_match}")
        if choose not in CHOICES:
            raise ValueError(f"choose: expected one of {', '.join(CHOICES)}; got {choose!r}")
        if isinstance(store, str):
            raise ValueError("store: expected a list of texts, got one")
        if store is not None and not isinstance(store, NgramIndex | Iterable):
            raise ValueError(f"store: expected an NgramIndex or a list of texts, got {type(store).__name__}")
        self.max_match, self.min_match, self.choose = max_match, min_match, choose
        self._texts = store
        self._store: NgramIndex | None = None

    def bind(self, models: Sequence[Engine], tokenizer: Any | None) -> Drafter:  # noqa: ARG002
        """A copy with an index over its store."""
        bound = copy.copy(self)
        if isinstance(self._texts, NgramIndex) or self._texts is None:
            bound._store = self._texts
        else:
            bound._store = NgramIndex(max_match=self.max_match)
            for text in self._texts:
                bound._store.extend(_as_ids(text, tokenizer))
                bound._store.begin_text()
        return bound

    def propose(
        self,
        batch: Batch,  # noqa: ARG002
        requests: Sequence[Request],
        draft_lens: Sequence[int],
        min_probability: float = 0.0,  # noqa: ARG002
        hands_over: bool = False,  # noqa: ARG002
    ) -> None:
        """Look up all requests in one call."""
        drafts = self.look_up([self._index(request) for request in requests], max(draft_lens))
        for request, tokens, most in zip(requests, drafts, draft_lens, strict=True):
            add_chosen(request, tokens[:most])

    def candidates(self, request: Request, count: int, length: int) -> list[list[int]]:
        """What followed the longest n-grams, the most frequent first, or after the most recent one."""
        index = self._index(request)
        tries = [index.propose_tree(count * length, max_levels=length, min_match=self.min_match)]
        if self._store is not None:
            text = (request.task.prompts[0] + request.settled)[-self._store.max_match :]
            how: dict[str, Any] = {"max_levels": length, "context": text, "min_match": self.min_match}
            tries.append(self._store.propose_tree(count * length, **how))
        first = self.look_up([index], length) if self.choose == "recent" else []
        return [*first, *(path for trie in sorted(tries, key=lambda trie: -trie[3]) for path in paths_of(*trie[:2]))]

    def look_up(self, indices: Sequence[NgramIndex], most: int) -> list[list[int]]:
        """Up to so many tokens after each of these texts."""
        options: dict[str, Any] = {"store": self._store, "min_match": self.min_match, "choose": self.choose}
        drafts, found, _ = NgramIndex.propose_batch(indices, most, **options)
        return [tokens[:num_found] for tokens, num_found in zip(drafts.tolist(), found.tolist(), strict=True)]

    def new_index(self, prompt: Sequence[int]) -> NgramIndex:
        """The index of a text that begins with a prompt."""
        return NgramIndex(prompt, max_match=self.max_match)

    def _index(self, request: Request) -> NgramIndex:
        """The request's own, over its prompt and all settled tokens."""
        prompt = request.task.prompts[0]
        if request.drafter_state is None:
            request.drafter_state = self.new_index(prompt)
        index: NgramIndex = request.drafter_state
        index.extend(request.sequence[len(index) - len(prompt) : request.num_settled])
        return index


def _as_ids(text: str | Sequence[int], tokenizer: Any | None) -> Sequence[int]:
    if not isinstance(text, str):
        return text
    if tokenizer is None:
        raise ValueError("store: text needs a tokenizer; pass tokenizer= to SpeculativeEnsemble, or token ids")
    return tokenizer(text, add_special_tokens=False)["input_ids"]
