"""libspecens by its header, without what the Python package makes of it: its structs and functions for ctypes."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import specens_kernels
from specens_kernels import instruction_set
from specens_kernels.arguments import (
    ChainArguments,
    Draft,
    RandomSource,
    Report,
    Rule,
    SamplingArguments,
    Target,
    TreeArguments,
    report_of,
    stream_of,
    target_of,
    uniforms_of,
)

HEADER = Path(specens_kernels.get_include(), "specens.h")
SOURCE = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.S)
LIBRARY = ctypes.CDLL(str(Path(specens_kernels.get_library(), "libspecens.so")))
NUMBERS = {"size_t": ctypes.c_size_t, "double": ctypes.c_double, "int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64}
DTYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3, torch.int32: 4, torch.int64: 5}


def _structs() -> dict[str, type[ctypes.Structure]]:
    found: dict[str, type[ctypes.Structure]] = {}
    for name, body in re.findall(r"typedef struct specens_\w+ \{(.*?)\} (specens_\w+);", SOURCE, flags=re.S):
        name, body = body, name
        fields = []
        for line in body.split(";"):
            text = " ".join(line.split())
            if text:
                kind, field = re.fullmatch(r"(.*?[\s*])(\w+)|.*\(\*(\w+)\).*", text).group(1, 2)  # type: ignore[union-attr]
                pointer = kind is None or "*" in kind
                field = field or re.search(r"\(\*(\w+)\)", text)[1]  # type: ignore[index]
                fields.append((field, ctypes.c_void_p if pointer else NUMBERS[kind.strip()]))
        found[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return found


def _functions() -> dict[str, tuple[str, list[str]]]:
    """The types of the result and of the arguments of each function, of which ctypes is told."""
    found = {}
    pattern = re.compile(r"^SPECENS_API (.*?)\b(specens_\w+)\((.*?)\);", re.S | re.M)
    for result, name, arguments in pattern.findall(SOURCE):
        own = [re.sub(r"\w+$", "", " ".join(argument.split())).strip() for argument in arguments.split(",")]
        found[name] = result, kinds = result.strip(), [kind for kind in own if kind]
        function, pointer = getattr(LIBRARY, name), ctypes.c_char_p if "char" in result else ctypes.c_void_p
        function.argtypes = [ctypes.c_void_p if "*" in kind else NUMBERS[kind] for kind in kinds]
        function.restype = pointer if "*" in result else NUMBERS.get(result)
    return found


STRUCTS = _structs()
FUNCTIONS = _functions()


class Memory:
    """Structs and arrays that live as long as this object."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def pointer(self, value: Any) -> int | None:
        self.kept.append(value)
        return ctypes.addressof(value)

    def doubles(self, values: Any) -> int | None:
        return self.pointer((ctypes.c_double * len(values))(*values)) if values else None

    def struct(self, name: str, **fields: Any) -> ctypes.Structure:
        """With its defaults, as the header's own function gives them."""
        own = STRUCTS[f"specens_{name}"]()
        own.struct_size = ctypes.sizeof(own)
        defaults = re.search(rf"specens_{name}_init\(void\) \{{(.*?)\}}", SOURCE, flags=re.S)
        for field, value in re.findall(rf"{name}\.(\w+) = (-?\d+);", defaults[1] if defaults else ""):
            setattr(own, field, type(getattr(own, field))(float(value)))
        for field, value in fields.items():
            setattr(own, field, value)
        self.kept.append(own)
        return own

    def tensors(self, values: list[Tensor]) -> int | None:
        array = (STRUCTS["specens_tensor"] * len(values))()
        for view, value in zip(array, values, strict=True):
            view.data, view.dtype, view.ndim = (
                value.data_ptr(),
                DTYPES.get(value.dtype, 256 + value.itemsize),
                value.dim(),
            )
            view.sizes = self.pointer((ctypes.c_int64 * value.dim())(*value.shape))
            view.strides = self.pointer((ctypes.c_int64 * value.dim())(*value.stride()))
        self.kept.append(values)
        return self.pointer(array)

    def tensor(self, value: Tensor | None) -> int | None:
        return None if value is None else self.tensors([value])

    def fields(self, tensors: dict[str, Tensor | None]) -> dict[str, int | None]:
        """Tensors, as a struct's fields."""
        return {name: self.tensor(value) for name, value in tensors.items()}

    def named(self, group: Any, names: dict[str, str]) -> dict[str, Any]:
        """A group's tensors by the names of a struct."""
        return {field: self.tensor(getattr(group, name)) for field, name in names.items()}


def sampling(memory: Memory, group: SamplingArguments) -> int | None:
    tensors = memory.named(group, {name: name for name in ("temperatures", "top_ks", "top_ps", "min_ps")})
    numbers = {name: getattr(group, name) for name in ("temperature", "top_k", "top_p", "min_p", "min_p_first")}
    return memory.pointer(memory.struct("sampling", **tensors, **numbers))


def target(memory: Memory, group: Target) -> int | None:
    edits = group.processing
    processing = None
    if edits.active:
        names = ("repetition_penalties", "frequency_penalties", "presence_penalties", "min_tokens_rows")
        tables = ("bias_tokens", "bias_values", "end_tokens", "prompt_tokens", "output_tokens")
        numbers = ("repetition_penalty", "frequency_penalty", "presence_penalty", "min_tokens")
        own = memory.named(edits, {name: name for name in (*names, *tables)})
        processing = memory.pointer(
            memory.struct("processing", **own, **{name: getattr(edits, name) for name in numbers})
        )
    fields = memory.named(group, {name: name for name in ("weight_rows", "row_offsets", "allowed")})
    return memory.pointer(
        memory.struct(
            "target",
            member_logits=memory.tensors(group.member_logits),
            num_members=len(group.member_logits),
            ensemble=group.ensemble,
            filter_members=group.filter_members,
            weights=memory.doubles(group.weights),
            plausibility=group.plausibility,
            sampling=sampling(memory, group.sampling),
            processing=processing,
            **fields,
        )
    )


def draft(memory: Memory, group: Draft, target_group: Target) -> int | None:
    fields = memory.named(group, {name: name for name in ("tokens", "drafters", "logits", "slots", "lens")})
    own = None if group.sampling is target_group.sampling else sampling(memory, group.sampling)
    packed = group.tokens.dim() == 1
    numbers = {
        "drafter": group.drafter,
        "processed": group.processed,
        "max_draft_len": group.draft_len if packed else -1,
    }
    return memory.pointer(memory.struct("draft", sampling=own, **fields, **numbers))


def random(memory: Memory, group: RandomSource) -> int | None:
    return memory.pointer(memory.struct("random", **memory.named(group, {name: name for name in RandomSource._fields})))


def rule(memory: Memory, group: Rule) -> int | None:
    table = {"table": memory.doubles(group.table), "table_size": len(group.table)}
    return memory.pointer(memory.struct("rule", kind=group.kind, threshold=group.threshold, alpha=group.alpha, **table))


def verdict_buffers(memory: Memory, batch: int, width: int, report: Report, tree: bool) -> tuple[Any, list[Tensor]]:
    """A specens_verdict, and its tensors in the order in which operators return them."""
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {"tokens": (torch.int64, (batch, width))}
    shapes |= dict.fromkeys(("num_accepted", "num_tokens", "next_token"), (torch.int64, (batch,)))
    shapes["status"] = torch.int32, (batch,)
    if tree:
        shapes["path"] = torch.int64, (batch, width - 1)
    if report.logprobs:
        shapes["logprobs"] = torch.float32, (batch, width)
    if report.top:
        shapes["top_tokens"] = torch.int64, (batch, width, report.top)
        shapes["top_logprobs"] = torch.float32, (batch, width, report.top)
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in shapes.items()}
    memory.kept += tensors.values()
    return memory.struct("verdict", **{name: own.data_ptr() for name, own in tensors.items()}), list(tensors.values())


class Workspace:
    """A specens_workspace without threads of its own."""

    def __init__(self, threads: Any = None) -> None:
        self.handle = ctypes.c_void_p()
        call("specens_workspace_create", threads, self.handle)

    def reserve(self, **sizes: int) -> None:
        call("specens_workspace_reserve", self.handle, Memory().struct("sizes", **sizes))

    def __del__(self) -> None:
        LIBRARY.specens_workspace_destroy(self.handle)


class SpecensError(Exception):
    """What specens_last_error says."""


class Here:
    """Calls to the library in this process, with the instruction set that torch's operators use now."""

    def call(self, name: str, words: list[Any], _memory: list[Any]) -> tuple[Any, str]:
        LIBRARY.specens_use_instruction_set((instruction_set.in_use() or "plain").encode())
        return getattr(LIBRARY, name)(*words), LIBRARY.specens_last_error().decode()

    def integers(self, address: int, count: int) -> list[int]:
        return list((ctypes.c_int64 * count).from_address(address))


CALLER: Any = Here()  # tests/remote has another


def call(name: str, *arguments: Any, memory: Memory | None = None) -> Any:
    """A function of specens.h. memory: what the structs among the arguments point to.

    Tensors, structs and arrays stand for their addresses, None for NULL; a c_void_p holds a handle.
    """
    result, kinds = FUNCTIONS[name]
    words = [_word(value, kind) for value, kind in zip(arguments, kinds, strict=True)]
    returned, message = CALLER.call(name, words, [*arguments, *(memory.kept if memory else ())])
    if result == "int32_t" and returned:
        raise SpecensError(returned, message)
    return returned


def _word(value: Any, kind: str) -> Any:
    if isinstance(value, Tensor):
        return value.data_ptr()
    if isinstance(value, ctypes.c_void_p) and not kind.endswith("**"):
        return value
    if isinstance(value, (ctypes.Structure, ctypes.Array, ctypes.c_void_p)):
        return ctypes.addressof(value)
    return value


def draw(member_logits: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    """Through specens_sample, with the options of the operator; its results in the operator's order."""
    memory, stream, report = Memory(), stream_of(options), report_of(options)
    given = memory.struct(
        "draw",
        target=target(memory, target_of(member_logits, options)),
        random=random(memory, uniforms_of(options)),
        step=stream.step,
        stream=stream.stream,
        gumbel_count=stream.best,
        logprobs=report.logprobs,
        top_logprobs=report.top,
    )
    batch = len(member_logits[0])
    results = {"tokens": torch.empty(batch, max(stream.best, 1), dtype=torch.int64)}
    results["status"] = torch.empty(batch, dtype=torch.int32)
    if report.logprobs:
        results["logprobs"] = torch.empty(batch, max(stream.best, 1))
    if report.top:
        results["top_tokens"] = torch.empty(batch, report.top, dtype=torch.int64)
        results["top_logprobs"] = torch.empty(batch, report.top)
    memory.kept += results.values()
    drawn = memory.struct("drawn", **{name: own.data_ptr() for name, own in results.items()})
    call("specens_sample", given, drawn, None, memory=memory)
    return list(results.values())


def verify(arguments: ChainArguments | TreeArguments, workspace: Workspace | None = None) -> list[Tensor]:
    """Through specens_verify_chain or specens_verify_tree."""
    memory, of_tree = Memory(), isinstance(arguments, TreeArguments)
    given = memory.struct(
        "tree" if of_tree else "chain",
        target=target(memory, arguments.target),
        draft=draft(memory, arguments.draft, arguments.target),
        random=random(memory, arguments.random_numbers),
        rule=rule(memory, arguments.rule),
        logprobs=arguments.report.logprobs,
        top_logprobs=arguments.report.top,
    )
    width = arguments.draft.draft_len + 1
    if isinstance(arguments, TreeArguments):
        given.parents, given.max_levels = memory.tensor(arguments.tree.parents), arguments.tree.levels
        given.without_replacement = arguments.tree.without_replacement
        width = arguments.tree.levels + 1
    offsets, members = arguments.target.row_offsets, arguments.target.member_logits
    batch = len(members[0]) if offsets is None else len(offsets) - 1
    verdict, results = verdict_buffers(memory, batch, width, arguments.report, of_tree)
    name = "specens_verify_tree" if of_tree else "specens_verify_chain"
    call(name, given, verdict, workspace and workspace.handle, memory=memory)
    return results
