"""What the driver writes with a model, against what transformers' own `generate` writes with it."""

from collections.abc import Callable

import torch
from specens import SpeculativeEnsemble

from specens_kernels import Mixture, Sampling
from zoo.tiny import changed_copy

PROMPTS = ([3, 5, 7, 9, 11, 2, 4, 6], [20, 20, 7], [8, 1, 30, 31, 5, 5, 44, 2, 17, 19, 23])
NUM_NEW = 24
EQUAL = "equal"
JOB = {"max_new_tokens": NUM_NEW, "sampling": Sampling(temperature=0.0)}


def texts_of_generate(model: torch.nn.Module) -> list[list[int]]:
    """The greedy text after each of the PROMPTS, alone, by transformers."""
    texts = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NUM_NEW, "do_sample": False}
        texts.append(model.generate(ids, **settings)[0, len(prompt) :].tolist())
    return texts


def texts_of_schedules(model: torch.nn.Module) -> dict[str, Callable[[], list[list[int]]]]:
    """By schedule, what writes the first text; "batch" writes all, with drafts, in one batch."""
    pair = [model, changed_copy(model)]
    only = {"ensemble": Mixture((1, 0)), "drafter": 1}

    def one(members: list, **settings) -> list[list[int]]:
        return [SpeculativeEnsemble(members, **settings).generate(PROMPTS[0], **JOB).tokens]

    def batch() -> list[list[int]]:
        ensemble = SpeculativeEnsemble(pair, schedule="fixed", draft_lens=3, **only)
        texts = {text.index: text.tokens for text in ensemble.generate_many(PROMPTS, batch_size=3, **JOB)}
        return [texts[index] for index in range(len(PROMPTS))]

    return {
        "standard": lambda: one([model], schedule="standard"),
        "fixed": lambda: one(pair, schedule="fixed", draft_lens=3, **only),
        "alternate": lambda: one(pair, schedule="alternate", draft_lens=2, ensemble=Mixture((1, 0))),
        "batch": batch,
        "tree": lambda: one(pair, schedule="tree", tree=(2, 2), **only),
    }


def outcomes(model: torch.nn.Module, schedules: tuple[str, ...] | None = None) -> dict[str, str]:
    """For each schedule EQUAL, the reason why it is refused, or what went wrong after it was not."""
    try:
        expected, reason = texts_of_generate(model), None
    except Exception as error:  # noqa: BLE001, whatever a model fails with
        expected, reason = None, f"transformers cannot generate: {error}"
    found = {}
    for name, write in texts_of_schedules(model).items():
        if schedules is None or name in schedules:
            found[name] = _outcome(write, expected, reason)
    return found


def _outcome(write: Callable[[], list[list[int]]], expected: list[list[int]] | None, reason: str | None) -> str:
    try:
        texts = write()
    except ValueError as error:
        return f"refused: {error}"
    except Exception as error:  # noqa: BLE001
        return f"wrong: {type(error).__name__} {error}"
    if expected is None:
        return f"nothing to compare with: {reason}"
    if texts == expected[: len(texts)]:
        return EQUAL
    indices = [index for own, other in zip(texts, expected, strict=False) for index in _first_difference(own, other)]
    return f"wrong: another token at {indices}"


def _first_difference(one: list[int], other: list[int]) -> list[int]:
    return [index for index, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]][:1]
