"""`model.generate(..., custom_generate=speculative_ensemble, members=[...])`: an ensemble's text by speculation."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.generation import GenerateDecoderOnlyOutput

from specens.adapters.transformers.row import Row
from specens.adapters.transformers.settings import check_settings, processors_of_row, prompts_of
from specens.decoding.request import Ensemble, Event
from specens.drafters import TreePlan
from specens.engines.transformers.logits_processors import split_processors
from specens.generate import SpeculativeEnsemble
from specens.settings.jobs import Job
from specens_kernels import Sampling


class TextEndsError(Exception):
    """Leaves a generation when all its texts have ended."""


def speculative_ensemble(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any | None = None,
    *,
    members: Sequence[Any] = (),
    ensemble: Ensemble | None = None,
    draft_lens: int | Sequence[int] | None = None,
    schedule: str | None = None,
    drafter: int | None = None,
    tree: TreePlan | Sequence[int] | None = None,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Generate from the ensemble of a model and `members`; to be passed to its `generate` as `custom_generate`.

    `generate` takes what it always takes: a generation config or its fields (do_sample, temperature, top_k, top_p,
    min_p, penalties, banned and forced tokens, max_new_tokens, eos_token_id, num_return_sequences, ...), logits
    processors, stopping criteria, a streamer for one prompt, and a batch of prompts, padded on the left with an
    attention mask. Temperature, top-k, top-p and min-p at the end of the processors act on the ensemble's distribution,
    all others on the logits of every member, a row at a time: they must depend on ids and logits alone. Further:
    members: the other models of the ensemble, loaded; `model` is the first, and all share its tokenizer.
    ensemble, draft_lens, schedule, drafter, tree: as of `specens.SpeculativeEnsemble`.

    Stopping criteria see every token, also those that came in one round; a text ends with the first that they stop at.
    Every text has a seed from torch's global generator: `set_seed` reproduces it.
    Returns what `generate` does: int64 [batch, tokens], padded on the right, or with `return_dict_in_generate` an
    output with `sequences`. Raises ValueError naming what is not supported: logits processors that keep a state,
    beams, caches of the caller, scores and hidden states, inputs that are not token ids.
    """
    caller = _variables_of_generate()
    streamer = caller.get("streamer") if streamer is None else streamer
    if caller.get("assistant_model") is not None:
        raise ValueError("assistant_model: expected None, as the members draft for each other; give it among members")
    check_settings(model, members, generation_config, synced_gpus, model_kwargs)
    if streamer is not None and len(input_ids) > 1:
        raise ValueError(f"streamer: expected one prompt, got {len(input_ids)}")
    ends = generation_config._eos_token_tensor
    decoder = SpeculativeEnsemble([model, *members], None, ensemble, draft_lens, schedule, drafter=drafter, tree=tree)
    edits, sampling = _split(logits_processor, generation_config.do_sample)
    job = {
        "max_new_tokens": generation_config.max_length - input_ids.shape[1],
        "sampling": sampling,
        "generation_config": "none",  # what it says is in what `generate` made of it
        "stop_tokens": [] if ends is None else ends.flatten().tolist(),
    }
    prompts = prompts_of(input_ids, model_kwargs.get("attention_mask"), model_kwargs.get("position_ids"))
    rows = [Row(ids, stopping_criteria, streamer) for ids in input_ids]
    own = [
        processors_of_row(edits, index, ids[: len(ids) - len(prompt)])
        for index, (ids, prompt) in enumerate(zip(input_ids, prompts, strict=True))
    ]
    _generate(decoder, prompts, rows, job, own)
    if streamer is not None:
        streamer.end()
    sequences = _padded([row.ids for row in rows], generation_config._pad_token_tensor)
    return GenerateDecoderOnlyOutput(sequences=sequences) if generation_config.return_dict_in_generate else sequences


def _generate(
    decoder: SpeculativeEnsemble,
    prompts: Sequence[list[int]],
    rows: Sequence[Row],
    job: dict,
    edits: Sequence[list[Any]],
) -> None:
    """Write the texts of a batch into its rows; one that a criterion has ended goes on unseen while others do.

    edits: the logits processors of each row.
    """
    seeds = torch.zeros(len(rows), dtype=torch.int64)
    if not job["sampling"].greedy:  # greedy generations leave the global generator alone
        seeds = torch.randint(2**63 - 1, (len(rows),))

    def read(index: int, _: int, events: list[Event]) -> None:
        rows[index].read(events)
        if all(row.ended for row in rows):
            raise TextEndsError

    jobs = [
        Job(prompt, seed=seed, logits_processors=own)
        for prompt, seed, own in zip(prompts, seeds.tolist(), edits, strict=True)
    ]
    try:
        for text in decoder.generate_many(jobs, batch_size=len(jobs), on_tokens=read, **job):
            rows[text.index].ended = True
    except TextEndsError:
        pass


def _split(processors: Any, do_sample: bool) -> tuple[list[Any], Sampling]:
    """The processors that edit the logits of every member, and the sampling parameters that the others are."""
    return split_processors(processors) if do_sample else (list(processors), Sampling(temperature=0.0))


def _padded(texts: list[Tensor], padding: Tensor | None) -> Tensor:
    """int64 [batch, tokens] of the longest. Raises ValueError where padding is needed and there is no id for it."""
    if padding is None and len({len(text) for text in texts}) > 1:
        raise ValueError("pad_token_id: expected an id, as the texts of the batch have different lengths; got None")
    return pad_sequence(texts, batch_first=True, padding_value=0 if padding is None else int(padding))


def _variables_of_generate() -> dict[str, Any]:
    """The arguments that `generate` was called with; it hands a callable neither its streamer nor its assistant."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "generate" and "custom_generate" in frame.f_locals:
            return frame.f_locals
        frame = frame.f_back
    return {}
