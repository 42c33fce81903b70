"""The page of the C API, from specens.h: each part of it, and each declaration under the comment before it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DECLARATION = re.compile(r"(?:/\*((?:(?!\*/).)*)\*/\s*)?(SPECENS_API [^;]+;)", re.DOTALL)  # with the comment before it


def header() -> Path:
    """Where the header lies in the sources."""
    return next((ROOT / "csrc").rglob("specens.h"))


def functions(text: str) -> list[str]:
    """The functions that it declares."""
    return re.findall(r"SPECENS_API [^;(]*?\b(specens_\w+)\(", text)


def markdown() -> str:
    """What the header says at its start, then a section for each function, then all of it."""
    text = header().read_text()
    first, _, rest = text.partition("*/")
    title, _, preface = first.removeprefix("/*").partition("\n")
    sections = [
        _section(found) for found in re.finditer(r"(?:/\*((?:(?!\*/).)*)\*/\s*)?(SPECENS_API [^;]+;)", rest, re.DOTALL)
    ]
    whole = f'??? abstract "specens.h"\n\n    ```c\n{_indent(text)}\n    ```'
    return "\n\n".join([_prose(title), _prose(preface), *sections, "## The header", whole])


def _section(found: re.Match[str]) -> str:
    comment, declaration = found.groups()
    name = functions(declaration)[0]
    code = re.sub(r"\s*\n\s*", "\n    ", declaration)
    return "\n\n".join(filter(None, [f"## {name}", f"```c\n{code}\n```", _prose(comment or "")]))


def _prose(text: str) -> str:
    """Comments are set three spaces in, code in them seven."""
    lines = [re.sub(r"^ {3}", "", line) for line in text.strip("\n").splitlines()]
    escaped = [line if line.startswith("    ") else re.sub(r"[\[*]", r"\\\g<0>", line) for line in lines]
    return "\n".join(escaped).strip()


def _indent(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())
