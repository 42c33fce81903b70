"""What models are called where there is little space."""

from __future__ import annotations

from collections.abc import Sequence


def short_names(models: Sequence[str]) -> list[str]:
    """The last parts of each model's path, as many as it takes to tell them apart; the same model twice is numbered."""
    deepest = max((model.count("/") for model in models), default=0) + 1
    for depth in range(1, deepest + 1):
        names = [_end(model, depth) for model in models]
        if len(set(names)) == len(set(models)):
            break
    repeated = {name for name in names if names.count(name) > 1}
    return [f"{name} (member {index})" if name in repeated else name for index, name in enumerate(names)]


def _end(model: str, depth: int) -> str:
    return "+".join("/".join(part.rstrip("/").split("/")[-depth:]) for part in model.split("+"))
