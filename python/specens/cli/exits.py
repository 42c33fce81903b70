"""How commands end: with one clear line instead of a traceback, and an exit code that says why."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperCommand

from specens.cli import INTERRUPTED

WRONG_ARGUMENT = 2
FAILED = 1
BROKEN_PIPE = 141  # what a shell shows of a program that SIGPIPE ends


class Output(Console):
    """A console whose reader may go away, which `Command` hears of."""

    def on_broken_pipe(self) -> None:
        """Leave it to the command, in place of an end of its own."""
        raise BrokenPipeError


errors = Output(stderr=True)


class Command(TyperCommand):
    """A command that fails with one line: exit code 2 for wrong arguments, 1 for failures, 130 for Ctrl-C.

    It ends quietly where nobody reads its output any more.
    """

    def make_context(self, *arguments: Any, **settings: Any) -> Any:
        """Parse them, and take --config for what they leave out."""
        try:
            return super().make_context(*arguments, **settings)
        except ValueError as error:
            raise _exit(error, WRONG_ARGUMENT) from None
        except OSError as error:
            raise _exit(error, FAILED) from None

    def invoke(self, ctx: Any) -> Any:
        """Run it, and write out all that it has printed."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except typer.Exit:
            raise
        except KeyboardInterrupt as interrupt:
            if ctx.params.get("json"):
                print_json({"interrupted": True})
            errors.print(str(interrupt) or "interrupted before anything was generated", style="yellow", soft_wrap=True)
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            _drop_unwritable()
            raise typer.Exit(BROKEN_PIPE) from None
        except (ValueError, NotImplementedError) as error:
            raise _exit(error, WRONG_ARGUMENT, self._options(ctx)) from None
        except (RuntimeError, ImportError, OSError, MemoryError) as error:
            raise _exit(error, FAILED) from None
        return result

    def _options(self, ctx: Any) -> dict[str, str]:
        """The options that were given or have a default, by the argument with whose name Python's errors begin."""
        given = {name for name, value in ctx.params.items() if value is not None}
        return {own.name: own.opts[0] for own in self.params if own.name in given and own.opts[0].startswith("--")}


def print_json(values: dict) -> None:
    """Print one object to standard output, at once."""
    sys.stdout.write(json.dumps(values, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def _exit(error: Exception, code: int, options: Mapping[str, str] = MappingProxyType({})) -> typer.Exit:
    _drop_unwritable()
    message = " ".join(str(error).split()) or type(error).__name__
    name, colon, _ = message.partition(": ")
    if colon and name in options:
        message = options[name] + message.removeprefix(name)
    errors.print(f"Error: {message}", style="red", highlight=False, markup=False, soft_wrap=True)
    return typer.Exit(code)


def _drop_unwritable() -> None:
    """Send what cannot be written nowhere; Python would try once more at its end, and complain."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
