"""The verification of one assisted generation: drafts and the target's logits in, emitted tokens out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from specens.engines.transformers.logits_processors import in_one_pass, split_processors
from specens_kernels import Mixture, Sampling, Status, Verdict, verify_chain

CHOOSES_THE_MOST_LIKELY = ("SinglePositionMultiTokenCandidateGenerator",)  # whatever the distribution it reports
FILTERS_ITS_DRAFTS = ("AssistedCandidateGenerator", "EarlyExitCandidateGenerator")
RULES = ("token", "gumbel")
REPORTS_EVERY_TOKEN = (*FILTERS_ITS_DRAFTS, "UniversalSpeculativeDecodingGenerator")


class Verification:
    """What a generation draws with, and its two meeting points with transformers: `watch` and `verify`.

    config: the settings of the generation. processors: all of its logits processors. rule: of `verify_chain`, "token"
        or "gumbel". seed: int64 [1], of the generation.
    kept: those that transformers still runs, position by position; the others are folded into the verification.

    With `assistant_ensemble_weight` w, every token has the distribution w * target + (1 - w) * assistant, each after
    the processors. The assistant says nothing about the token after its last draft, so that a chain has no bonus row.
    """

    def __init__(self, config: Any, processors: LogitsProcessorList, rule: str = "token") -> None:
        self.config = config
        self.rule = rule
        self.processors = processors
        weight = getattr(config, "assistant_ensemble_weight", None)
        self.ensemble = None if weight is None else Mixture((weight, 1 - weight))
        kept, self.sampling = self._split()
        self.kept = LogitsProcessorList(kept)
        self._num_accepted = 0
        self._draft_is_distributed = True
        # Of torch's global generator, so that set_seed reproduces a text; greedy generations leave it alone.
        self.seed = torch.randint(2**63 - 1, (1,)) if config.do_sample else torch.zeros(1, dtype=torch.int64)

    def _split(self) -> tuple[list[Any], Sampling]:
        if not self.config.do_sample:
            return list(self.processors), Sampling(temperature=0.0)
        if self.config.return_dict_in_generate and self.config.output_scores:  # they are wanted as processed
            return list(self.processors), Sampling()
        if self.ensemble is not None:  # the filters act on each of the two before they are mixed
            return in_one_pass(self.processors), Sampling()
        return split_processors(self.processors)

    def processors_for_drafts(self) -> LogitsProcessorList | None:
        """What the candidate generator is to be made with.

        Prompt lookup asks the processors which of its tokens are forbidden. Filters have no answer to that, which
        depends on the logits, and running them takes longer than everything else.
        """
        if not getattr(self.config, "prompt_lookup_num_tokens", None):
            return self.processors
        return self.kept if self.kept else None

    def watch(self, generator: Any) -> None:
        """Look after a candidate generator.

        Drafts without a distribution are marked, an assistant filters its drafts in one pass, and the generator is told
        how many of them were accepted, which is not one less than the emitted tokens where there is no bonus. Raises
        ValueError where the ensemble has no distribution of the assistant for every token.
        """
        get_candidates, update = generator.get_candidates, generator.update_candidate_strategy
        self._draft_is_distributed = type(generator).__name__ not in CHOOSES_THE_MOST_LIKELY
        if self.ensemble is not None:
            _draft_to_the_end(generator)
        if self.config.do_sample and type(generator).__name__ in FILTERS_ITS_DRAFTS:
            _filter_in_one_pass(generator)

        def get(input_ids: Tensor, *arguments: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
            tokens, logits = get_candidates(input_ids, *arguments, **keywords)
            return tokens, tokens.new_empty(0) if logits is None else _in_order_of_target(generator, logits)

        def tell(input_ids: Tensor, scores: Tensor, num_matches: int) -> None:  # noqa: ARG001
            update(input_ids, scores, self._num_accepted)

        generator.get_candidates, generator.update_candidate_strategy = get, tell

    def verify(
        self, candidate_input_ids: Tensor, candidate_logits: Tensor, candidate_length: int, new_logits: Tensor
    ) -> tuple[Tensor, int]:
        """Stands in for transformers' `_speculative_sampling`.

        candidate_input_ids: int64 [1, tokens], the text and the drafts after it. candidate_logits: [1,
        candidate_length, vocab], empty where the drafts have no distribution. new_logits: float32 [1, candidate_length
        + 1, vocab]. Returns the emitted tokens [1, emitted], cut at the end of the text, and one less than their
        number.
        """
        num_settled = candidate_input_ids.shape[1] - candidate_length
        drafts = candidate_input_ids[:, num_settled:].to(new_logits.device)
        draft_logits = candidate_logits.to(new_logits.device) if candidate_logits.numel() else None
        verdict = self._verdict(drafts, draft_logits, new_logits, num_settled)
        tokens = verdict.tokens[verdict.tokens >= 0].tolist()
        self._num_accepted = int(verdict.num_accepted)
        if len(tokens) == self._num_accepted and (self.ensemble is None or len(tokens) < candidate_length):
            raise RuntimeError(f"no token can be drawn at position {num_settled}: {Status(int(verdict.status))!r}")
        tokens = self._cut(tokens, num_settled)
        return torch.tensor([tokens], device=candidate_input_ids.device), len(tokens) - 1

    def _verdict(self, drafts: Tensor, draft_logits: Tensor | None, new_logits: Tensor, num_settled: int) -> Verdict:
        members: list[Tensor] = [new_logits]
        drawn: dict[str, Any] = {}
        by_gumbel = self.rule == "gumbel"  # who drafted plays no part then
        if self.ensemble is not None:
            if draft_logits is None:
                raise RuntimeError(f"assistant_ensemble_weight: the assistant has no distribution at {num_settled}")
            members, drawn = [new_logits[:, :-1], draft_logits], {} if by_gumbel else {"drafter": 1}
        elif not by_gumbel and self.config.do_sample and self._draft_is_distributed and draft_logits is not None:
            drawn = {"draft_logits": draft_logits, "draft_sampling": Sampling()}  # they were processed when it drew
        return verify_chain(
            members,
            drafts,
            ensemble=self.ensemble,
            sampling=self.sampling,
            rule=self.rule,
            seeds=self.seed.to(drafts.device),
            positions=torch.tensor([num_settled], device=drafts.device),
            **drawn,
        )

    def _cut(self, tokens: list[int], num_settled: int) -> list[int]:
        """Up to the first end of sequence, and to the length that was asked for."""
        ends = getattr(self.config, "_eos_token_tensor", None)
        ids = set() if ends is None else set(ends.flatten().tolist())
        end = next((index + 1 for index, token in enumerate(tokens) if token in ids), len(tokens))
        return tokens[: min(end, self.config.max_length - num_settled)]


def _draft_to_the_end(generator: Any) -> None:
    """Let an assistant draft the last token too, which is else left to the target."""
    if type(generator).__name__ not in REPORTS_EVERY_TOKEN:
        raise ValueError(
            "assistant_ensemble_weight: expected an assistant whose distribution is known at every token (a draft "
            f"model or an early exit), got {type(generator).__name__}"
        )
    generator.main_model_max_length += 1


def _filter_in_one_pass(generator: Any) -> None:
    """Draft with the same filters as one processor, and only once: an assistant is given those of the target, and its
    settings would make them again."""
    generator.logits_processor = LogitsProcessorList(in_one_pass(generator.logits_processor))
    settings = generator.generation_config
    settings.temperature, settings.top_k, settings.top_p, settings.min_p = 1.0, 0, 1.0, None


def _in_order_of_target(generator: Any, logits: Tensor) -> Tensor:
    """Logits [1, drafts, vocab] of an assistant with another tokenizer, each at the token that it belongs to.

    transformers cuts the assistant's output down to the tokens that both know, in the order of a vocabulary, and takes
    them to be in the order of their ids.
    """
    translator = getattr(generator, "_atm_translator", None)
    cut = getattr(translator, "assistant_overlap_token_ids", None)
    if translator is None or cut is None:
        return logits
    targets = translator._assistant_to_target_input_ids
    ordered = torch.full_like(logits, float("-inf"))
    ordered[..., targets[cut]] = logits[..., targets[targets != translator.SUPPRESS_TOKEN_ID]]
    return ordered
