"""A draft model with another tokenizer: its text is tokenized again for the members.

Source of drafts by text: universal assisted generation, Timor et al., Accelerating LLM Inference with Lossless
Speculative Decoding Algorithms for Heterogeneous Vocabularies, ICML 2025. With collaborative rules: Wang et al., 2025.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specens.decoding.detokenizer import REPLACEMENT
from specens.decoding.draws import seeds_of_uniforms
from specens.decoding.reader import Reader, open_reader
from specens.decoding.reads import read
from specens.decoding.request import OUTSIDE, Request
from specens.decoding.statistics import Statistics
from specens.drafters.draft_model import as_engine
from specens.drafters.drafter import Drafter
from specens.engines.protocol import Engine, Needs
from specens_kernels import sample, target_logprobs

if TYPE_CHECKING:
    from specens.decoding.batch import Batch

CONTEXT = 8  # tokens in front of the drafts: how a tokenizer decodes the first of them depends on those before
ANCHORS = ("", "\n", "a", ".")  # texts in front of the drafts' text, where a tokenizer would begin it with a space
LEAST_PROBABILITY = 1e-30
MOST_TEXTS = 4  # of one tree, since each is a chain of forwards


@dataclass
class _Reading:
    """What the draft model has read of a request: its first token as a prompt, and those after it."""

    first: int
    reader: Reader
    sequence: list[int]


class OtherTokenizer(Drafter):
    """A model with a tokenizer of its own drafts text; the ensemble's tokenizer turns it into draft tokens.

    The tokens of one side that make up a token of the other are found by where they begin in the text. Drafts are
    chosen, as far as the test goes: their text was drawn, but the tokens have no distribution. So every rule stays
    lossless. The model reads each request by itself, and reads again what tokenizes otherwise than before. It drafts
    nothing where it has nothing to read (an empty text and no token that begins one), nor after its last position.

    model, tokenizer: a Hugging Face causal LM with its tokenizer, or a model spec and None.
    probabilities: tell the rules Replacement and DecisionTree how probable each draft was: the product of the
        probabilities of the model's own tokens that begin in it. Only for these rules.
    dtype, device, ray_options, model_kwargs: for a spec, as of `SpeculativeEnsemble`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any | None = None,
        *,
        probabilities: bool = False,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        ray_options: Mapping[str, Any] | None = None,
        model_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._model = as_engine(model, dtype, device, ray_options, model_kwargs)
        tokenizer = self._model.tokenizer if tokenizer is None else tokenizer
        if tokenizer is None:
            raise ValueError("tokenizer: expected the tokenizer of the draft model, got None")
        if not callable(tokenizer):
            raise ValueError(f"tokenizer: expected one of transformers, loaded, got {type(tokenizer).__name__}")
        if not isinstance(probabilities, bool):
            raise ValueError(f"probabilities: expected True or False, got {probabilities!r}")
        self.has_probabilities = self.estimates = probabilities
        self._own = tokenizer
        self._members: Any = None
        self._num_ids = 0

    @property
    def models(self) -> list[Engine]:
        """The draft model."""
        return [self._model]

    def bind(self, models: Sequence[Engine], tokenizer: Any | None) -> Drafter:  # noqa: ARG002
        """Itself, beside the ensemble's tokenizer."""
        if tokenizer is None:
            raise ValueError("tokenizer: expected the ensemble's tokenizer, since an OtherTokenizer drafts text")
        self._model.check(Needs())
        bound = OtherTokenizer(self._model, self._own, probabilities=self.has_probabilities)
        bound._members = tokenizer
        bound._num_ids = max(tokenizer.get_vocab().values()) + 1
        return bound

    def propose(
        self,
        batch: Batch,  # noqa: ARG002
        requests: Sequence[Request],
        draft_lens: Sequence[int],
        min_probability: float = 0.0,
        hands_over: bool = False,
    ) -> None:
        """Draft text for one request after another, of `draft_lens` of the model's own tokens."""
        for request, draft_len in zip(requests, draft_lens, strict=True):
            for token, chance in self._drafts(request, draft_len, min_probability, hands_over):
                if not request.can_draft:
                    break
                request.add_draft(token, OUTSIDE, self._row(token, chance) if self.estimates else None)

    def candidates(self, request: Request, count: int, length: int) -> list[list[int]]:
        """Texts that the model drafts, after each of its most likely first tokens."""
        texts = (self._drafts(request, length, rank=rank) for rank in range(min(count, MOST_TEXTS)))
        return [[token for token, _ in text] for text in texts]

    def _drafts(
        self,
        request: Request,
        draft_len: int,
        min_probability: float = 0.0,
        hands_over: bool = False,
        rank: int | None = None,
    ) -> list[tuple[int, float]]:
        """The members' tokens of a drafted text, each with its probability.

        rank: of the first of the model's own tokens among the most likely ones; None draws it too.
        """
        ids = request.task.prompts[0] + request.settled
        own = self._ids_to_read(_decode(self._members, ids))
        most = self._model.max_length
        if not own or (most is not None and len(own) + draft_len > most):
            return []
        return self._tokens_of_members(ids, *self._write(request, own, draft_len, min_probability, hands_over, rank))

    def _ids_to_read(self, text: str) -> list[int]:
        """Its own ids of a text, open after; of an empty one the token that begins or ends texts, if any."""
        ids, bare = self._own(text)["input_ids"], self._own(text, add_special_tokens=False)["input_ids"]
        ends = {self._own.eos_token_id, getattr(self._own, "sep_token_id", None)}
        while ids and ids[-1] in ends and ids[-1:] != bare[-1:]:
            ids = ids[:-1]
        starts = (self._own.bos_token_id, self._own.eos_token_id)
        return ids or [token for token in starts if token is not None][:1]

    def _tokens_of_members(
        self, ids: list[int], context: list[int], drafts: list[int], probabilities: list[float]
    ) -> list[tuple[int, float]]:
        """The members' tokens after ids of the model's drafts after its context, each with its probability."""
        ends = bool(drafts) and drafts[-1] == self._own.eos_token_id
        written = drafts[:-1] if ends else drafts
        text, own_starts = _text_after(self._own, context, written)
        text = text.rstrip(REPLACEMENT)  # of a character whose other bytes are not drafted yet
        tokens, starts = self._tokenize_after(ids, text)
        chances = _joined(own_starts, probabilities[: len(written)], starts)
        end = self._members.eos_token_id
        last = [(end, probabilities[-1])] if ends and end is not None else []
        return [*zip(tokens, chances, strict=True), *last]

    def _tokenize_after(self, ids: list[int], text: str) -> tuple[list[int], list[int]]:
        """The members' tokens that show a text after ids, and where each begins in it; [] where none do."""
        for anchor in ANCHORS if text else ():
            front = self._members(anchor, add_special_tokens=False)["input_ids"]
            tokens = self._members(anchor + text, add_special_tokens=False)["input_ids"]
            shown, starts = _text_after(self._members, ids, tokens[len(front) :])
            if tokens[: len(front)] == front and shown == text:
                return tokens[len(front) :], starts
        return [], []

    def _write(
        self,
        request: Request,
        ids: list[int],
        draft_len: int,
        min_probability: float,
        hands_over: bool,
        rank: int | None,
    ) -> tuple[list[int], list[int], list[float]]:
        """The model's own tokens of the text, those that it drafts after them, and the probabilities of these."""
        reading = self._read(request, ids)
        drafts: list[int] = []
        probabilities: list[float] = []
        while len(drafts) < draft_len and (not probabilities or probabilities[-1] >= min_probability):
            (logits,) = read(reading.reader, reading.sequence + drafts, 1)
            token = self._next(request, logits, len(drafts), None if drafts else rank)
            chances = target_logprobs([logits]).exp()[0]
            if token < 0 or (hands_over and float(chances.max()) < min_probability):
                break
            drafts.append(token)
            probabilities.append(float(chances[token]))
            if token == self._own.eos_token_id:
                break
        return [reading.first, *reading.sequence], drafts, probabilities

    def _next(self, request: Request, logits: Tensor, step: int, rank: int | None) -> int:
        """A token drawn from logits [1, vocab], or the one of a rank; -1 where there is none."""
        if rank is not None:
            best = logits[0].topk(min(rank + 1, logits.shape[-1])).indices.tolist()
            return best[rank] if rank < len(best) else -1
        seeds = seeds_of_uniforms([request], logits.device)
        return int(sample([logits], sampling=request.task.sampling, **seeds, step=step).tokens)

    def _read(self, request: Request, ids: list[int]) -> _Reading:
        """The reading of a request, gone back to where its text tokenizes as before."""
        reading: _Reading | None = request.drafter_state
        same = _num_same(reading.sequence, ids[1:]) if reading is not None and reading.first == ids[0] else 0
        if reading is not None and same == len(ids) - 1 < reading.reader.num_read:
            same -= 1  # the last token is read again, for the logits after it
        if reading is None or reading.first != ids[0] or same < 0:
            reader = open_reader(self._model, [[ids[0]]], [0], Statistics.of(1))
            reading = request.drafter_state = _Reading(ids[0], reader, [])
        else:
            reading.reader.roll_back(same)
        reading.sequence = ids[1:]
        return reading

    def _row(self, token: int, probability: float) -> Tensor:
        """Logits [vocab] in which one draft has its probability, and any other token the rest."""
        row = torch.full((self._num_ids,), float("-inf"))
        row[token - 1 if token else 1] = math.log1p(-probability) if probability < 1 else float("-inf")
        row[token] = math.log(max(probability, LEAST_PROBABILITY))
        return row


def _num_same(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two lists begin with alike."""
    indices = (index for index, (own, its) in enumerate(zip(one, other, strict=False)) if own != its)
    return next(indices, min(len(one), len(other)))


def _decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _text_after(tokenizer: Any, context: Sequence[int], tokens: Sequence[int]) -> tuple[str, list[int]]:
    """The text of tokens after a context, and the place in it where each of them begins."""
    context = list(context[-CONTEXT:])
    lengths = [len(_decode(tokenizer, [*context, *tokens[:count]])) for count in range(len(tokens) + 1)]
    text = _decode(tokenizer, [*context, *tokens])[lengths[0] :]
    return text, [length - lengths[0] for length in lengths[:-1]]


def _joined(own_starts: Sequence[int], probabilities: Sequence[float], starts: Sequence[int]) -> list[float]:
    """The probability of each token that begins at `starts`: the product over the model's own that begin in it.

    A token in which none begins is a part of one of the model's own, and certain once that is.
    """
    joined = [1.0] * len(starts)
    for start, probability in zip(own_starts, probabilities, strict=True):
        index = max(bisect_right(starts, start) - 1, 0)
        if joined:
            joined[index] *= probability
    return joined
