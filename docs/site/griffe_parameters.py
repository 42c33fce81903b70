"""Docstrings here tell of arguments in running text, `seed: reproduces the text.`; on the site each is a list item."""

from __future__ import annotations

import re
from typing import Any

from griffe import Class, Extension, Function, Object


class Parameters(Extension):
    """Makes lists of the arguments, fields and properties that a docstring tells about."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring of a function by its parameters, of a class by its attributes and __init__."""
        if obj.docstring is None or not isinstance(obj, Class | Function):
            return
        names = _names(obj)
        if names:
            obj.docstring.value = as_lists(obj.docstring.value, names)


def _names(obj: Object) -> set[str]:
    if isinstance(obj, Function):
        return {parameter.name.lstrip("*") for parameter in obj.parameters} - {"self", "cls"}
    init = obj.members.get("__init__")
    return {name for name, member in obj.members.items() if member.is_attribute} | (
        _names(init) if isinstance(init, Function) else set()
    )


def as_lists(text: str, names: set[str]) -> str:
    """`text` with an item for each of `names`, or several between commas, that a sentence explains."""
    word = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    several = rf"(?:{word})(?:(?:, | and )(?:{word}))*"
    shape = r"\[[^\]\n]*\][^:\n.]*|\([^)\n]*\)"
    start = rf"(?:^|(?<=\n)|(?<=[.;)] ))\s*({several})(?: ({shape}))?: "
    parts = re.split(start, text)
    lines = [parts[0].rstrip(), ""]
    for name, form, said in zip(parts[1::3], parts[2::3], parts[3::3]):
        said, *rest = re.split(r"\n(?=\s*Raises |\n)", said, maxsplit=1)
        item = re.sub(r"\s*\n\s*", " ", said.strip())
        code = re.sub(r"\w+(?=,| and |$)", r"`\g<0>`", name)
        lines.append(f"- {code}{' ' + form if form else ''}: {item}")
        if rest:
            lines += ["", re.sub(r"(?m)^\s+", "", rest[0].strip("\n")), ""]
    return "\n".join(lines)
