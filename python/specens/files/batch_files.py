"""From a file of prompts to a file of texts, by a run that may be ended at any time and started again.

Beside the texts lies a file with the settings of the run and its seed. A run that is started again keeps the seed and
writes what is missing, so that in the end every text is there once, from the seed that it has in an undisturbed run. It
is the same text where the batch around it was the same or the run is exact; else a model may round its logits
otherwise, after which the text goes on otherwise, in bfloat16 often.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specens.decoding.request import Ensemble
from specens.decoding.trace import Round
from specens.files.json_lines import JsonLines, parse_lines, write_whole
from specens.files.prompt_file import PromptLine, digest
from specens.files.workers import Workers, ask
from specens.settings.arguments import check_seed
from specens.settings.jobs import Job, TaskMaker, derived_seed, draw_seed

if TYPE_CHECKING:
    from specens.generate import Generation, SpeculativeEnsemble

SETTINGS_SUFFIX = ".settings.json"


@dataclass(frozen=True)
class Piece:
    """One text that is to be written: of a prompt, by its number, and among the samples of that prompt."""

    line: PromptLine
    index: int
    sample: int
    seed: int

    def job(self, ensemble: Ensemble | None) -> Job:
        """What `generate_many` is to do. ensemble: of all prompts."""
        return Job(
            self.line.prompt,
            ensemble=self.line.ensemble(ensemble),
            seed=self.seed,
            max_new_tokens=self.line.values.get("max_new_tokens"),
            min_new_tokens=self.line.values.get("min_new_tokens"),
            stop_strings=self.line.stop_strings,
            **self.line.parameters,
        )

    def record(self, generation: Generation) -> dict:
        """The line of the output file."""
        return {
            "id": self.line.values.get("id"),
            "index": self.index,
            "sample": self.sample,
            "text": generation.text,
            "tokens": generation.tokens,
            "seed": generation.seed,
            "finish_reason": generation.finish_reason,
            "statistics": generation.statistics.to_dict(),
        }


def open_texts(
    output: Path,
    lines: Sequence[PromptLine],
    settings: dict[str, Any],
    seed: int | None,
    told: Callable[[str, Any], tuple[str, str]] = lambda name, value: (name, repr(value)),
) -> tuple[JsonLines, int]:
    """The file of texts, begun or to be continued, and the seed of its first text.

    settings: everything that the texts depend on, as plain values for JSON. seed: None draws one, or takes the kept
        one. Prompts may be added after those that the file was begun with. told: how an error names a setting, and
        its value.
    Raises ValueError where the file was begun with other settings or prompts, or by something else.
    """
    settings = json.loads(json.dumps(settings))  # as they come back from the file
    texts = JsonLines(output, durable=True)
    try:
        beside = output.with_name(output.name + SETTINGS_SUFFIX)
        begun = _begun(texts, beside)
        if begun is not None:
            _check_same(output, begun, lines, settings, seed, told)
            seed = begun["seed"]
        first = draw_seed() if seed is None else seed
        values = {"settings": settings, "seed": first, "num_prompts": len(lines), "digest": digest(lines)}
        if values != begun:
            write_whole(beside, values)
    except BaseException:
        texts.close()
        raise
    return texts, first


def _begun(texts: JsonLines, beside: Path) -> dict | None:
    """What the file was begun with; None where it has no text yet."""
    if not texts.is_new and not beside.exists():
        raise ValueError(f"{texts.path}: expected a new file, or one with {beside.name} beside it to be continued")
    if not texts.kept:
        return None
    values = parse_lines(beside, beside.read_bytes().replace(b"\n", b" "))[0]
    if not {"settings", "seed", "num_prompts", "digest"} <= values.keys():
        raise ValueError(f"{beside}: expected the settings of a run, got the fields {', '.join(values)}")
    return values


def _check_same(
    output: Path,
    begun: dict,
    lines: Sequence[PromptLine],
    settings: dict[str, Any],
    seed: int | None,
    told: Callable[[str, Any], tuple[str, str]],
) -> None:
    then, now = (
        begun["settings"] | {"seed": begun["seed"]},
        settings | {"seed": begun["seed"] if seed is None else seed},
    )
    for name in sorted(then.keys() | now.keys()):
        if then.get(name) != now.get(name):
            (named, expected), (_, got) = told(name, then.get(name)), told(name, now.get(name))
            raise ValueError(
                f"{named}: expected {expected}, with which {output} was begun; got {got}. "
                "Give another file for the texts, or the same settings"
            )
    if digest(lines[: begun["num_prompts"]]) != begun["digest"]:
        raise ValueError(f"{output}: expected the {begun['num_prompts']} prompts that it was begun with; got others")


def missing(kept: Sequence[dict], lines: Sequence[PromptLine], samples: int, seed: int) -> list[Piece]:
    """The texts of which there is no record yet, in the order of their prompts. seed: of the first of all texts.

    A prompt with a seed of its own has it for its first sample, the first text that of the run; all others have seeds
    derived from these.
    """
    check_seed(seed)
    there = {(record["index"], record["sample"]) for record in kept}
    return [
        Piece(line, index, sample, _seed_of(line, index, sample, seed))
        for index, line in enumerate(lines)
        for sample in range(samples)
        if (index, sample) not in there
    ]


def _seed_of(line: PromptLine, index: int, sample: int, seed: int) -> int:
    own = line.values.get("seed")
    return derived_seed(seed, index, sample) if own is None else derived_seed(own, 0, sample)


def write_texts(
    ensemble: SpeculativeEnsemble | Workers,
    pieces: Sequence[Piece],
    append: Callable[[dict], None],
    *,
    batch_size: int = 8,
    exact: bool = False,
    on_text: Callable[[Piece, Generation], None] | None = None,
    on_round: Callable[[Round], None] | None = None,
    **settings: Any,
) -> None:
    """Generate the pieces and append each record as soon as its text is finished.

    ensemble: in this process, or in Workers. batch_size, exact: as of `generate_many`. on_text: called after each.
    on_round: as of `generate_many`, with the numbers of the prompt and the sample.
    settings: of all texts, see `specens.settings.jobs.Settings`.
    Raises ValueError naming the prompt where one is wrong, before anything is generated; RuntimeError naming the first
    prompt whose text failed, when all others are appended; MemoryError where memory runs out, KeyboardInterrupt and
    whatever else stops the generation, when all finished texts have been appended.
    """
    jobs = ask(ensemble, partial(_checked_jobs, list(pieces), settings))
    failed: list[tuple[Piece, Exception]] = []

    def report(of_job: Round) -> None:
        assert on_round is not None
        piece = pieces[of_job.index]
        on_round(replace(of_job, index=piece.index, sample=piece.sample))

    try:
        for generation in ensemble.generate_many(
            jobs,
            batch_size=batch_size,
            exact=exact,
            on_round=None if on_round is None else report,
            on_error=lambda index, _, error: failed.append((pieces[index], error)),
            **settings,
        ):
            append(pieces[generation.index].record(generation))
            if on_text is not None:
                on_text(pieces[generation.index], generation)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise MemoryError(str(error)) from error
        raise
    if failed:
        piece, first = failed[0]
        raise RuntimeError(f"{len(failed)} of {len(pieces)} texts failed; {piece.line.where}: {first}") from first


def _checked_jobs(pieces: Sequence[Piece], settings: dict[str, Any], ensemble: SpeculativeEnsemble) -> list[Job]:
    make_task = TaskMaker(ensemble, settings)  # type: ignore[arg-type]
    return [_checked_job(make_task, piece, ensemble.ensemble) for piece in pieces]


def _checked_job(make_task: TaskMaker, piece: Piece, ensemble: Ensemble | None) -> Job:
    try:
        job = piece.job(ensemble)
        make_task(job, 0, 0)
    except ValueError as error:
        raise ValueError(f"{piece.line.where}: {error}") from None
    return job


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on whatever device."""
    texts = ("can't allocate memory", "not enough memory", "out of memory")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
    )
