"""The settings of a call in a file, TOML or YAML by its extension: what --config reads and --save-config writes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_type_hints

import typer

from specens.files.json_lines import check_index

OF_THIS_CALL = {"config", "save_config", "help"}


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Take what a file says as the defaults of the command, so that options given beside it win.

    Raises ValueError where it is no such file, names an option that the command has none of, or has another value than
    the option takes.
    """
    if path is None or context.resilient_parsing:
        return path
    kinds = types_of(context.command)
    named = {_name(option): str(one.name) for one in context.command.params for option in one.opts}
    values: dict[str, Any] = {}
    for key, value in _read(path):
        name = named.get(_name(str(key)), str(key))
        if name not in kinds:
            there_are = ", ".join(map(_key, kinds))
            raise ValueError(
                f"--config: {path}: no setting {key} of specens {context.command.name}; it has {there_are}"
            )
        if name in values:
            raise ValueError(f"--config: {path}: expected {_key(name)} once, got it twice")
        values[name] = _value(name, kinds[name], value, path)
    context.default_map = values
    return path


def types_of(command: Any) -> dict[str, Any]:
    """The type of each setting of a command, as it is annotated but for None, in their order."""
    hints = get_type_hints(command.callback)
    names = [str(one.name) for one in command.params if one.name not in OF_THIS_CALL]
    return {name: _without_none(hints[name]) for name in names}


def check_saved(path: Path | None) -> Path | None:
    """Raise ValueError where no settings can be written there."""
    if path is not None:
        _check_extension("--save-config", path)
        check_index("--save-config", path)
    return path


def save_config(context: typer.Context) -> None:
    """Write what the call was given, by options and by --config, where --save-config says."""
    path: Path | str | None = context.params.get("save_config")
    if path is None:
        return
    is_to = " = " if Path(path).suffix == ".toml" else ": "
    given = [name for name in types_of(context.command) if _is_given(context, name)]
    lines = [f"{_key(name)}{is_to}{_written(_plain(context.params[name]))}\n" for name in given]
    Path(path).write_text("".join(lines), encoding="utf-8", newline="\n")


Config = Annotated[
    Path | None,
    typer.Option(
        is_eager=True,
        callback=read_config,
        help="Options, and models, from a TOML or YAML file, by name: draft-lens = 4. Those of the command line win.",
    ),
]
SaveConfig = Annotated[
    Path | None,
    typer.Option(callback=check_saved, help="Write what this call was given, for --config: NAME.toml or NAME.yaml."),
]


def _without_none(kind: Any) -> Any:
    kinds = get_args(kind)
    return next(one for one in kinds if one is not NoneType) if NoneType in kinds else kind


def _name(option: str) -> str:
    return option.lstrip("-").replace("-", "_")


def _key(name: str) -> str:
    return name.replace("_", "-")


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [str(one) for one in value]
    return str(value) if isinstance(value, Path) else value


def _check_extension(option: str, path: Path) -> None:
    if path.suffix not in (".toml", ".yaml", ".yml"):
        raise ValueError(f"{option}: expected a name that ends in .toml, .yaml or .yml, got {path}")


def _read(path: Path) -> Iterable[tuple[Any, Any]]:
    """What the file says, in its order; a key may be there twice. Raises ValueError naming it, or OSError."""
    _check_extension("--config", path)
    if not path.is_file():
        raise ValueError(
            f"--config: expected a file, got {path}, which {'is a folder' if path.is_dir() else 'is not there'}"
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
        return _read_toml(text) if path.suffix == ".toml" else _read_yaml(text)
    except ValueError as error:
        raise ValueError(f"--config: {path}: {error}") from None


def _read_toml(text: str) -> Iterable[tuple[Any, Any]]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(text).items()


def _read_yaml(text: str) -> Iterable[tuple[Any, Any]]:
    import yaml

    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is None:
            return []
        if not isinstance(node, yaml.MappingNode):
            raise ValueError("expected option: value, one a line")
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    if len(values) < len(node.value):  # YAML itself would take the last of them
        keys = [key.value for key, _ in node.value]
        raise ValueError(f"expected {next(key for key in keys if keys.count(key) > 1)} once, got it twice")
    return values.items()


def _value(name: str, kind: Any, value: Any, path: Path) -> Any:
    """What the command line's parser takes for it; texts are left to that. Raises ValueError naming the option."""
    if value is None:
        return None
    if kind is bool:
        expected, right = "true or false", isinstance(value, bool)
    elif kind == list[str]:
        value = [value] if isinstance(value, str) else value
        expected, right = "a text or a list of texts", _are(value, str)
    elif kind in (int, float):
        expected = "an integer" if kind is int else "a number"
        right = _is(value, str, int, kind)
    else:
        value = value if isinstance(value, list) else [value]
        expected, right = "a text, a number or a list of numbers", _are(value, str, int, float)
        value = ",".join(map(str, value)) if right else value
    if not right:
        raise ValueError(f"--config: {path}: {_key(name)}: expected {expected}, got {value!r}")
    return value


def _is(value: Any, *kinds: type) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def _are(values: Any, *kinds: type) -> bool:
    return isinstance(values, list) and all(_is(one, *kinds) for one in values)


def _written(value: Any) -> str:
    """As TOML and YAML both read it: JSON, with what they take only escaped escaped in their way, not as UTF-16."""
    if isinstance(value, float):
        return repr(value)  # JSON has no inf; YAML takes that as a text, which an option for a number does too
    text = json.dumps(value, ensure_ascii=False)
    return "".join(one if one.isprintable() else f"\\U{ord(one):08x}" for one in text)
