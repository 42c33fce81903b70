"""What a model can do, found out by trying: signatures and class names promise more, or less, than forwards keep.

A probe reads a few ids in the way in question and token by token, as `generate` does, and compares the logits. Each is
made once for a model, when a schedule first needs to know.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from specens.engines.protocol import Needs, Read
from specens.engines.transformers.kv_cache import Rollback
from specens.engines.transformers.member import Member
from specens.engines.transformers.model import Model
from specens.engines.transformers.ragged_cache import RaggedCache
from specens.engines.transformers.reading import Reading

logger = logging.getLogger(__name__)

PROMPT_LEN, TEXT_LEN = 5, 9
# An index of few heads gives many keys the score 0, and which of them are read then depends on the forward's shape.
SAFE_INDEX_HEADS = 16
WAYS = [{"several": several, "rolls_back": back} for back, several in itertools.product((True, False), repeat=2)]
_FOUND: WeakKeyDictionary[Any, dict[tuple, Any]] = WeakKeyDictionary()


def reading_of(model: Model, needs: Needs) -> Reading:
    """How a model is to be read.

    Raises ValueError where it does not continue a text of tokens alone, or where a cache that was handed over for it
    cannot be rolled back.
    """
    speculates, trees, together = needs.rollback, needs.trees, needs.num_texts > 1
    if speculates and model.make_cache is not None:
        Rollback(model.new_cache())
    _known(model, "reads", _check_reads)
    reading = Reading(caches=_caches(model))
    if speculates:
        reading = replace(reading, **_known(model, "ways", _way_of_speculation))
    fixed = model.switch_length is None and model.growth_length is None and reading.caches
    masked = fixed and model.takes_masks and (trees or together) and _known(model, "several", _reads_several)
    return replace(
        reading,
        shares=together and masked and RaggedCache.suits(model) and _known(model, "shares", _shares),
        trees=trees and masked and reading.rolls_back and _known(model, "trees", _reads_trees),
    )


def _known(model: Model, name: str, probe: Callable[[Model], Any]) -> Any:
    """What a probe finds, remembered as long as the model lives."""
    found = _FOUND.setdefault(model.base, {})
    key = (name, model.make_cache, getattr(model.base.config, "_attn_implementation", None), str(model.dtype))
    if key not in found:
        with torch.inference_mode(), model.running():
            found[key] = probe(model)
    return found[key]


def _check_reads(model: Model) -> bool:
    kind = type(model.base).__name__
    if model.carries_memories:
        raise ValueError(f"members: expected a model that keeps a text in a cache, got {kind}, which carries memories")
    try:
        cache = model.new_cache() if model.has_cache else None
        logits = model.read(torch.tensor([_ids(model, 3)], device=model.device), cache, 0, 1)
    except Exception as error:
        message = f"members: expected a model that continues a text of tokens alone, got {kind}, which fails: {error}"
        raise ValueError(message) from error
    if logits.dim() != 3 or logits.shape[:2] != (1, 1):
        raise ValueError(f"members: expected logits [1, 1, vocab] of a text, got {list(logits.shape)} from {kind}")
    return True


def _caches(model: Model) -> bool:
    """Whether all that a model knows of a text is in its cache: some keep a state in their modules."""
    return model.has_cache and _known(model, "caches", _keeps_texts_apart)


def _keeps_texts_apart(model: Model) -> bool:
    text, own, other = _text(model), _prompt(model), _prompt(model)[:2]

    def read(by_turns: bool) -> Tensor:
        first, second = (_member(model, Reading(), prompt, can_roll_back=False) for prompt in (own, other))
        rows = []
        for length in range(3):
            rows.append(first.score(text[:length], 1))
            if by_turns:
                second.score(text[:length], 1)
        return torch.cat(rows)

    return agrees(model, lambda: read(True), read(False))


def _way_of_speculation(model: Model) -> dict[str, bool]:
    """The first of the WAYS that scores drafts, and what follows rejected ones, as if there had been none."""
    expected = _singles(model)
    has_ties = getattr(model.text_config, "index_n_heads", SAFE_INDEX_HEADS) < SAFE_INDEX_HEADS
    for way in [way for way in WAYS if not (has_ties and way["several"])]:
        reading = Reading(caches=_caches(model), **way)
        if agrees(model, partial(_speculate, model, reading), expected):
            if reading.caches and not reading.rolls_back:
                logger.warning("%s is read anew after every rejection", type(model.base).__name__)
            return way
    raise ValueError(
        f"members: expected a model that scores drafts as it scores tokens, got {type(model.base).__name__}; "
        "use schedule='standard'"
    )


def _reads_several(model: Model) -> bool:
    try:
        return _known(model, "ways", _way_of_speculation)["several"]
    except ValueError:
        return False


def _speculate(model: Model, reading: Reading) -> Tensor:
    """Logits [1 + TEXT_LEN, vocab] after the prompt and each token, with drafts between them that are rejected."""
    member, text = _member(model, reading), _text(model)
    wrong = text[::-1]
    rows = [member.score([], 1), member.score(text[:1] + wrong[:3], 4)[:1]]
    member.roll_back(1)
    rows.append(member.score(text[:4], 3))
    member.score(text[:4] + wrong[:2], 2)
    member.roll_back(4)
    rows += [member.score(text[:6], 2), member.score(text[:7], 1)]
    member.score(text[:7] + wrong[:1], 1)
    member.roll_back(7)
    rows.append(member.score(text, TEXT_LEN - 7))
    return torch.cat(rows)


def _shares(model: Model) -> bool:
    """Whether texts of different lengths in one ragged cache, some of which are cut, read as each does alone."""
    prompt, text = _prompt(model), _text(model)
    long, short = [*prompt, *text], [*prompt[:2], *text]

    def ragged() -> Tensor:
        cache = RaggedCache(model)
        rows = [cache.add_row(), cache.add_row()]
        first = cache.forward(rows, [0, 0], [long[:6], short[:2]], 1)
        cache.forward(rows, [6, 2], [[long[0]], short[2:5][::-1]], 1)  # rejected
        return torch.cat([first, cache.forward(rows, [6, 2], [long[6:7], short[2:5]], 1)])[:, 0]

    alone = [_member(model, Reading(), own[:1], can_roll_back=False) for own in (long, short)]
    lengths = ((6, 2), (7, 5))
    texts = [
        (member, own[1:end]) for ends in lengths for member, own, end in zip(alone, (long, short), ends, strict=True)
    ]
    return agrees(model, ragged, torch.cat([member.score(own, 1) for member, own in texts]))


def _reads_trees(model: Model) -> bool:
    """Whether the nodes of a tree, with a mask that says who sees whom, read as each path does."""
    way = _known(model, "ways", _way_of_speculation)
    settled, tokens, parents = _text(model)[6:8], _text(model)[:6], [-1, -1, 0, 0, 1, 3]

    def scored(member: Member) -> Tensor:
        rows = [member.read(Read(member, settled, 3, tokens[:2], parents[:2]))]
        rows.append(member.read(Read(member, settled, 4, tokens, parents)))
        member.keep_path([0, 3])
        return torch.cat([*rows, member.score([*settled, tokens[0], tokens[3], settled[0]], 1)])

    def expected() -> Tensor:
        member = _member(model, Reading(**way))
        paths = [[], *([tokens[node] for node in path] for path in ([0], [1], [0, 2], [0, 3], [1, 4], [0, 3, 5]))]
        rows = []
        for path in [*paths, [tokens[0], tokens[3], settled[0]]]:
            rows.append(member.score([*settled, *path], 1))
            member.roll_back(len(settled) - 1)
        return torch.cat(rows)

    return agrees(model, lambda: scored(_member(model, Reading(**way, trees=True))), expected())


def _singles(model: Model) -> Tensor:
    """Logits [1 + TEXT_LEN, vocab] after the prompt and each token, read one by one."""
    member, text = _member(model, Reading(caches=_caches(model), several=False), can_roll_back=False), _text(model)
    return torch.cat([member.score(text[:length], 1) for length in range(TEXT_LEN + 1)])


def agrees(model: Model, way: Callable[[], Tensor], expected: Tensor) -> bool:
    """Whether a way of reading raises nothing, and comes to the expected logits but for rounding."""
    try:
        logits = way()
    except Exception as error:  # noqa: BLE001
        logger.info("%s: %s", type(model.base).__name__, error)
        return False
    if logits.shape != expected.shape:
        return False
    tolerance = 3e-4 if expected.dtype == torch.float32 else 0.08
    own, others = (rows.float().nan_to_num(0.0, 0.0, 0.0) for rows in (logits, expected))
    return bool((own - others).abs().max() <= tolerance * others.abs().max())


def _member(model: Model, reading: Reading, prompt: Sequence[int] | None = None, can_roll_back: bool = True) -> Member:
    own = _prompt(model) if prompt is None else list(prompt)
    return Member(model, own, can_roll_back, reading)


def _ids(model: Model, count: int) -> list[int]:
    return [(3 + 7 * index) % model.vocab_size for index in range(count)]


def _prompt(model: Model) -> list[int]:
    return _ids(model, PROMPT_LEN)


def _text(model: Model) -> list[int]:
    return _ids(model, PROMPT_LEN + TEXT_LEN)[PROMPT_LEN:]
