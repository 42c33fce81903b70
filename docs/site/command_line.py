"""The page of the command `specens`, from the command itself."""

from __future__ import annotations

import inspect
from typing import Any

import typer
from specens.cli.main import app


def markdown() -> str:
    """A section for each command: what it does, and its options."""
    group: Any = typer.main.get_command(app)
    return "\n\n".join(_section(name, command) for name, command in group.commands.items())


def _section(name: str, command: Any) -> str:
    options = [row for parameter in command.params if (row := _row(parameter))]
    text = inspect.cleandoc(command.help or "")
    table = ["| option | means |", "|---|---|", *options] if options else []
    return "\n".join([f"## specens {name}", "", text, "", *table])


def _row(parameter: Any) -> str | None:
    if getattr(parameter, "hidden", False):
        return None
    names = ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])
    if parameter.param_type_name == "argument":
        names = f"`{(parameter.metavar or parameter.name).upper()}`"
    said = " ".join((getattr(parameter, "help", None) or "").split()).replace("|", "\\|")
    default = parameter.default
    told = "" if default in (None, False, (), []) or callable(default) else f" Default: `{default}`."
    return f"| {names} | {said}{told} |"
