"""An ensemble as a model of lm-evaluation-harness: texts by speculation, and log-likelihoods under the ensemble.

python -m specens.adapters.lm_eval --model specens --model_args "members=MODEL;OTHER,weights=.5;.5" --tasks gsm8k

is `lm_eval` with this model registered; after `import specens.adapters.lm_eval` its Python functions know it too. Lists
are separated by semicolons, since the harness separates arguments by commas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from torch import Tensor

from specens.cli.options import Placement, parse_draft_lens, parse_drafter, parse_ensemble, parse_object, parse_tree
from specens.engines.protocol import Engine, Needs, Read, running
from specens.generate import SpeculativeEnsemble
from specens.settings.jobs import Job
from specens.targets import DenseTarget
from specens_kernels import target_logprobs

SEPARATOR = ";"
MOST_NEW_TOKENS = 256  # as other models of the harness
SETTINGS = ("temperature", "top_k", "top_p", "min_p")
NAMED = {"do_sample", "until", "max_gen_toks", "max_new_tokens", *SETTINGS}

Tokens = tuple[Any, list[int], list[int]]  # what was asked, the context's ids and the continuation's


@register_model("specens")
class SpeculativeLM(TemplateLM):
    """Members, their ensemble and how it drafts, as the options of `specens generate` name them.

    members: specs, separated by semicolons, or a list; an `ensemble` made elsewhere stands in place of all of these.
    weights, logit_weights, contrast, plausibility, schedule, draft_lens, drafter, tree, rule, dtype, device: as there.
    model_kwargs: JSON text, as there, or a mapping.
    batch_size: texts that are read together. max_length: of context and text; None is what every member was built for.
    seed: of the texts that are sampled; each has one of its own.
    Raises ValueError where an argument is wrong.
    """

    def __init__(
        self,
        members: str | Sequence[Any] = (),
        weights: str | float | Sequence[float] | None = None,
        logit_weights: str | Sequence[float] | None = None,
        contrast: float | None = None,
        plausibility: float | None = None,
        *,
        schedule: str | None = None,
        draft_lens: str | int | None = None,
        drafter: str | int | None = None,
        tree: str | None = None,
        rule: str = "token",
        dtype: str | None = None,
        device: str | None = None,
        model_kwargs: str | Mapping[str, Any] | None = None,
        batch_size: int | str = 8,
        max_batch_size: int | None = None,  # noqa: ARG002 -- the harness gives it to every model
        max_length: int | None = None,
        seed: int = 0,
        ensemble: SpeculativeEnsemble | None = None,
    ) -> None:
        super().__init__()
        self.batch_size = _whole("batch_size", batch_size)
        self.seed = seed
        if ensemble is None:
            given = parse_object("model_kwargs", model_kwargs) if isinstance(model_kwargs, str) else model_kwargs
            placement = Placement(dtype, device, None, model_kwargs=given)
            specs = members.split(SEPARATOR) if isinstance(members, str) else list(members)
            mixture = parse_ensemble(len(specs), _numbers(weights), _numbers(logit_weights), contrast, plausibility)
            ensemble = SpeculativeEnsemble(
                specs,
                ensemble=mixture,
                draft_lens=None if draft_lens is None else parse_draft_lens(_numbers(draft_lens)),
                drafter=None if drafter is None else parse_drafter(str(drafter), placement),
                tree=parse_tree(_numbers(tree), None),
                schedule=schedule,
                rule=rule,
                **placement.apply(specs),
            )
        if ensemble.tokenizer is None:
            raise ValueError("members: expected a tokenizer, got models without one")
        if isinstance(ensemble.ensemble, DenseTarget):
            raise ValueError(f"ensemble: expected a mixture, got a {type(ensemble.ensemble).__name__}")
        self._mixture = ensemble.ensemble
        self.ensemble, self.tokenizer = ensemble, ensemble.tokenizer
        limits = [limit for model in ensemble.models if (limit := model.max_length) is not None]
        self.max_length = max_length or min(limits, default=2048)

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text, which stands in the place of an empty context."""
        return min(self.ensemble.end_of_sequence, default=0)

    @property
    def prefix_token_id(self) -> int:
        """What stands in the place of an empty context: the beginning of a sequence, where the tokenizer has one."""
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else begin

    @property
    def tokenizer_name(self) -> str:
        """By which the harness knows requests that it has cached."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The ids of a text; None adds special tokens as the tokenizer does."""
        special = True if add_special_tokens is None else add_special_tokens
        return self.tokenizer(string, add_special_tokens=special).input_ids

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a chat, by the tokenizer's template."""
        text = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        begin = self.tokenizer.bos_token or ""
        return text.removeprefix(begin)  # which tok_encode adds

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:  # noqa: ARG002
        """Texts of the ensemble, greedy unless a request samples."""
        jobs = [self._job(*request.args) for request in requests]
        texts = [""] * len(requests)
        settings = {"generation_config": "none", "seed": self.seed, "batch_size": self.batch_size}
        for text in self.ensemble.generate_many(jobs, **settings):  # type: ignore[arg-type]
            texts[text.index] = text.text
            self.cache_hook.add_partial("generate_until", requests[text.index].args, text.text)
        return texts

    def _job(self, context: str, wanted: dict[str, Any]) -> Job:
        unknown = sorted(set(wanted) - NAMED)
        if unknown:
            raise ValueError(f"gen_kwargs: expected some of {', '.join(sorted(NAMED))}; got {unknown[0]}")
        until = wanted.get("until") or []
        length = wanted.get("max_gen_toks", wanted.get("max_new_tokens")) or MOST_NEW_TOKENS
        ids = self.tok_encode(context)[-max(self.max_length - length, 1) :] or [self.prefix_token_id]
        sampling = {name: wanted[name] for name in SETTINGS if wanted.get(name) is not None}
        if not wanted.get("do_sample", sampling.get("temperature", 0.0) > 0):
            sampling = {"temperature": 0.0}
        stops = [until] if isinstance(until, str) else [stop for stop in until if stop]
        return Job(ids, max_new_tokens=length, stop_strings=stops, **sampling)

    def _loglikelihood_tokens(self, requests: list[Tokens], **_: Any) -> list[tuple[float, bool]]:
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        for indices, contexts, wanted in self._groups(requests):
            logprobs = self._logprobs(contexts, wanted)
            own = logprobs.gather(-1, wanted[..., None])[..., 0].double().sum(-1).tolist()
            greedy = (logprobs.argmax(-1) == wanted).all(-1).tolist()
            for index, score, is_greedy in zip(indices, own, greedy, strict=True):
                found[index] = (score, is_greedy)
                if requests[index][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[index][0], found[index])
        return found

    def _groups(self, requests: list[Tokens]) -> Iterator[tuple[list[int], Tensor, Tensor]]:
        """Requests of one shape, which go into one forward: their places, the ids that are read, those scored."""
        cut = [(index, *self._cut(*ids)) for index, (_, *ids) in enumerate(requests)]
        known = [(index, ids, wanted) for index, ids, wanted in cut if wanted]
        for _, alike in groupby(sorted(known, key=_shape), key=_shape):
            group = list(alike)
            for start in range(0, len(group), self.batch_size):
                indices, ids, wanted = zip(*group[start : start + self.batch_size], strict=True)
                yield list(indices), torch.tensor(ids), torch.tensor(wanted)

    def _cut(self, context: list[int], wanted: list[int]) -> tuple[list[int], list[int]]:
        """What is read, the end of the context and all but the last token that is scored, and what is scored."""
        wanted = wanted[-self.max_length :]
        return (context + wanted)[-(self.max_length + 1) :][:-1], wanted

    @torch.inference_mode()
    def _logprobs(self, ids: Tensor, wanted: Tensor) -> Tensor:
        """Log-probabilities [texts, tokens, vocab] of the ensemble at temperature 1, after each token's context."""
        models = self.ensemble.models
        with running(models):
            rows = [_rows(model, ids.tolist(), wanted.shape[1]) for model in models]
        return target_logprobs([own.to(rows[0].device) for own in rows], ensemble=self._mixture).cpu()

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:  # noqa: ARG002
        """The log-likelihood of whole texts, each token after as much of its text as members can read."""
        scores = []
        for (text,) in [request.args for request in requests]:
            ids = self.tok_encode(text, add_special_tokens=False)
            windows = utils.get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
            pieces: list[Tokens] = [(None, *utils.make_disjoint_window(window)) for window in windows]
            scores.append(sum(score for score, _ in self._loglikelihood_tokens(pieces)))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), scores[-1])
        return scores


def _rows(engine: Engine, texts: list[list[int]], num_rows: int) -> Tensor:
    """Logits [texts, num_rows, vocab] of a member after the last tokens of texts."""
    context = engine.open(Needs(len(texts), rollback=False))
    return torch.stack(context.read([Read(context.add(ids[:1]), ids[1:], num_rows) for ids in texts]))


def _shape(known: tuple[int, list[int], list[int]]) -> tuple[int, int]:
    return len(known[1]), len(known[2])


def _numbers(given: Any) -> Any:
    """Numbers between semicolons, or in a list, as the options of the command have them: between commas."""
    if isinstance(given, list | tuple):
        return ",".join(map(str, given))
    return None if given is None else str(given).replace(SEPARATOR, ",")


def _whole(name: str, given: int | str) -> int:
    if not str(given).isdigit() or int(given) < 1:
        raise ValueError(f"{name}: expected an integer >= 1, got {given!r}")
    return int(given)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
