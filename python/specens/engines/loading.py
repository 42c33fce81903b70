"""Members by their specs: which engine runs a model, and its tokenizer."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from specens.engines.protocol import Engine

RayOptions = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
Device = str | torch.device | None
ENGINES = {  # by the names that may stand before a spec; each module has a ModelLoader
    "transformers": "specens.engines.transformers.loader",
    "llama_cpp": "specens.engines.llama_cpp.loader",
    "ray": "specens.engines.ray.loader",
}


def engine_of(spec: str | os.PathLike[str]) -> tuple[str, str]:
    """The name of the engine that runs a model, and the spec without it.

    A spec names one by ENGINE: before it. Else llama.cpp runs GGUF files, where llama-cpp-python is installed, and
    transformers all others; a GGUF file it dequantises.
    """
    text = os.fspath(spec)
    name, colon, rest = text.partition(":")
    if colon and name in ENGINES:
        return name, rest
    base, _ = split_adapter(text)
    is_gguf = base.startswith("package:") or base.endswith(".gguf")
    return "llama_cpp" if is_gguf and importlib.util.find_spec("llama_cpp") else "transformers", text


def split_adapter(text: str) -> tuple[str, str | None]:
    """A spec's model, and the adapter after it."""
    if Path(text).exists() or "+" not in text:
        return text, None
    base, _, adapter = text.rpartition("+")
    return base, adapter


class Loader:
    """Loads members, and each file once: equal specs are one engine.

    dtype: of models that transformers runs, None is bfloat16. device: None is the GPU where there is one. revision: of
        names of the hub. model_kwargs: further arguments of transformers' `from_pretrained`.
        ray_options: of each actor, in the order in which they are loaded, of `options_of_actors`.
    """

    def __init__(
        self,
        dtype: str | torch.dtype | None = None,
        device: Device = None,
        revision: str | None = None,
        ray_options: Sequence[Mapping[str, Any]] | None = None,
        model_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._given = {"dtype": dtype, "device": device, "revision": revision, "model_kwargs": model_kwargs}
        self._ray_options = ray_options
        self._loaders: dict[str, Any] = {}

    def tokenizer(self, spec: str | os.PathLike[str]) -> Any:
        """A model's tokenizer. Raises ValueError for a spec that names no model, or files that cannot be read."""
        name, rest = engine_of(spec)
        return self._loader(name).tokenizer(rest)

    def engine(self, spec: str | os.PathLike[str]) -> Engine:
        """A model with its tokenizer. Raises ValueError as `tokenizer`, and for a device that its engine has not."""
        name, rest = engine_of(spec)
        return self._loader(name).engine(rest)

    @staticmethod
    def check(*loaders: Loader) -> None:
        """Raise ValueError for an argument of some loaders, alike but for devices, that no engine asked for uses."""
        engines = {name: own for loader in loaders for name, own in loader._loaders.items()}
        for name, value in loaders[0]._given.items():
            if value is not None and all(name in own.unused for own in engines.values()):
                raise ValueError(
                    f"{name}: expected none for models that {' and '.join(engines)} runs, got {str(value)!r}"
                )

    def _loader(self, name: str) -> Any:
        if name not in self._loaders:
            own = {"ray_options": self._ray_options} if name == "ray" else {}
            self._loaders[name] = importlib.import_module(ENGINES[name]).ModelLoader(**self._given, **own)
        return self._loaders[name]


def load_engine(
    spec: str | os.PathLike[str],
    dtype: str | torch.dtype | None = None,
    device: Device = None,
    ray_options: RayOptions = None,
    model_kwargs: Mapping[str, Any] | None = None,
) -> Engine:
    """One model with its tokenizer. The arguments are those of `Loader` and `options_of_actors`, and what it raises."""
    options = options_of_actors([spec], ray_options, device)
    loader = Loader(dtype, device, ray_options=options, model_kwargs=model_kwargs)
    engine = loader.engine(spec)
    Loader.check(loader)
    return engine


def devices_of(device: Device | Sequence[Device], members: Sequence[Any]) -> list[Device]:
    """The device of each member.

    device: of all that are given as specs, or in a list one for each member: None of a loaded one, and of an actor.
    Raises ValueError where these are not so many, or where one of them has a device already.
    """
    if not isinstance(device, list | tuple):
        return [device] * len(members)  # type: ignore[list-item]
    if len(device) != len(members):
        raise ValueError(f"device: expected one, or one for each of {len(members)} members; got {len(device)}")
    for index, (member, own) in enumerate(zip(members, device, strict=True)):
        is_loaded = not isinstance(member, str | os.PathLike)
        if own is not None and (is_loaded or engine_of(member)[0] == "ray"):
            what = "a loaded model" if is_loaded else "an actor, whose devices Ray gives it"
            raise ValueError(f"device: expected None as that of member {index}, {what}; got {str(own)!r}")
    return list(device)


def options_of_actors(
    specs: Sequence[Any], given: RayOptions, device: Device | Sequence[Device]
) -> Sequence[Mapping[str, Any]] | None:
    """Ray's options of the actor of each spec with `ray:` before it, None where there is none.

    given: of each, or of all alike. None: a GPU of the cluster for each, or an even part of one where they are fewer;
    none for device "cpu". Raises ValueError where they are not for so many, or no options of Ray's.
    """
    count = sum(engine_of(spec)[0] == "ray" for spec in specs)
    if count:
        of_actors = None if isinstance(device, list | tuple) else device
        return importlib.import_module(ENGINES["ray"]).options_of(count, given, of_actors)
    if given is not None:
        raise ValueError(f"ray_options: expected none without a spec with ray: before it, got {given!r}")
    return None
