"""What the host does in a call, on a GPU that is not there; tests/ops/test_triton_host_side.py runs this file."""

from __future__ import annotations

import gc
import importlib
import itertools
import os
import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from ops import test_arguments as wrong
from ops import test_verify_tree_arguments as wrong_trees
from packed import ragged, verify_packed
from problems import random_problem
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from tree_cases import random_case

from bench.gpu import checks, compile_first, host_time
from bench.gpu.checks import cache, mask, paged_cache
from gpu_stub import NotCompiled, forget_compiled, prefer_triton
from gpu_stub.plugin import variants
from specens_kernels import (
    Mixture,
    Processing,
    Replacement,
    Sampling,
    TokenTree,
    Verdict,
    Workspace,
    backend,
    compact_kv,
    sample,
    target_logprobs,
    tree_mask,
    uniforms,
    verify_chain,
    verify_tree,
    warmup,
)
from specens_kernels.backend import writing
from specens_kernels.parts import launches, replays
from specens_kernels.parts.replays import replayed

SEEDS = range(40 if os.environ.get("SPECENS_TEST_FULL") else 24)
VOCABS = (33, 2112)
REPORTS = ({}, {"logprobs": True}, {"logprobs": "raw", "top_logprobs": 1}, {"top_logprobs": 4})
STEPS = 500 if os.environ.get("SPECENS_TEST_FULL") else 60
MOST_SCRATCH = 0.02  # of the logits' memory
MOST_COMPILATIONS = 2  # of a kernel, while batches, lengths and tables change
pytestmark = pytest.mark.filterwarnings("ignore")


def calls_of(seed: int) -> Iterator[Callable[[], Any]]:
    problem = random_problem(seed, VOCABS)
    yield lambda: problem.verify("triton", **REPORTS[seed % 4])
    tree = random_case(seed)
    yield lambda: tree.verify("triton", **REPORTS[seed % 4])
    generator = torch.Generator().manual_seed(seed)
    moved = [cache(generator), paged_cache(generator)][seed % 2]
    yield lambda: compact_kv(**moved, backend="triton")
    shown = mask(generator, ("full", "packed", "additive", "tree")[seed % 4])
    yield lambda: tree_mask(**shown, backend="triton")
    requests = ragged(seed, bool(seed % 2))
    yield lambda: verify_packed(requests, "triton")
    if problem.logits[0].shape[1] > 0:
        rows = [values[:, 0] for values in problem.logits]
        seeds = torch.arange(len(rows[0]))
        random_numbers = {"seeds": seeds, "positions": seeds if seed % 2 else seeds + 1}
        settings = {"ensemble": problem.arguments["ensemble"], "sampling": problem.arguments["sampling"]}
        yield lambda: sample(rows, **settings, **random_numbers, backend="triton")
        if seed % 4 == 0:
            yield lambda: target_logprobs(problem.logits, **settings, backend="triton")
            yield lambda: uniforms(**random_numbers, backend="triton")
    if seed % 4 == 1:
        yield from cache_calls_of(seed, tree.parents)


def cache_calls_of(seed: int, parents: Tensor) -> Iterator[Callable[[], Any]]:
    batch, nodes = parents.shape
    lens, layout = torch.arange(batch) % 3, ("full", "tree", "packed", "additive")[seed // 4 % 4]
    yield lambda: tree_mask(parents, lens, layout=layout, max_prefix=3, backend="triton")
    caches = [torch.zeros(batch, 2, nodes + 3, 8, dtype=dtype) for dtype in (torch.float32, torch.float16)]
    kept = torch.arange(nodes).expand(batch, -1)
    yield lambda: compact_kv(caches, kept, lens, num_kept=lens, backend="triton")


@triton.jit(do_not_specialize=["general"])
def _any_kernel(special, general, CONSTANT: tl.constexpr):  # noqa: N803
    pass


def jit_key(launch: launches.Launch) -> str:
    *_, binder = launch.kernel.device_caches[0]
    return str(binder(**launch.arguments, num_warps=launch.num_warps)[1:])


def assert_tells_apart_what_the_jit_does(all_launches: list[launches.Launch]) -> None:
    found: dict[Any, str] = {}
    for launch in all_launches:
        own = launches.launch_key(launch, 0, {})
        assert found.setdefault(own, jit_key(launch)) == jit_key(launch), launch.arguments


def random_argument(choice: random.Random, memory: Tensor, depth: int = 0) -> Any:
    kind = choice.randrange(7 if depth < 3 else 6)
    if kind == 0:
        return choice.choice([0, 1, 2, 16, 17, -16, -1, 2**31 - 1, 2**31, -(2**31), 2**32, 2**62, 2**63 - 1, 2**63])
    if kind == 1:
        return choice.choice([0.0, 1.0, 0.5, True, False, None])
    if kind == 2:
        return tl.constexpr(choice.choice([0, 1, 2, True, False, 1.0, None]))
    if kind in (3, 4):
        return memory[choice.randrange(20) :].view(choice.choice([torch.int8, torch.uint8, torch.bool]))
    if kind == 5:
        return memory[8 * choice.randrange(4) :].view(choice.choice([torch.int64, torch.float64, torch.float32]))
    return tuple(random_argument(choice, memory, depth + 1) for _ in range(choice.randrange(3)))


def test_keys_tell_apart_what_the_jit_tells_apart_of_any_arguments():
    choice, memory = random.Random(0), torch.zeros(256, dtype=torch.int8)
    all_launches = []
    for _ in range(4000):
        special, general = random_argument(choice, memory), random_argument(choice, memory)
        constant = choice.choice([0, 1, True, 1.0, None, "text"])
        arguments = {"special": special, "general": general, "CONSTANT": constant}
        all_launches.append(launches.Launch(_any_kernel, (1,), arguments, 4))
    assert_tells_apart_what_the_jit_does(all_launches)


def test_keys_tell_apart_what_the_jit_tells_apart_of_the_launches_of_tests(monkeypatch):
    all_launches = []
    monkeypatch.setattr(launches, "_start", lambda launch, *_: all_launches.append(launch))
    for seed in SEEDS:
        for call in calls_of(seed):
            call()
    assert len(all_launches) > 200
    assert_tells_apart_what_the_jit_does(all_launches)
    own_keys = {launches.launch_key(launch, 0, {}) for launch in all_launches}
    assert len(own_keys) <= 1.2 * len(set(map(jit_key, all_launches)))


@pytest.fixture
def launched() -> Iterator[list[Any]]:
    """What kernels are launched with."""
    found: list[Any] = []
    NotCompiled.launched = lambda *launch: found.append(launch)
    yield found
    NotCompiled.launched = None


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)


def addresses_in(value: Any) -> Iterator[int]:
    """And other numbers."""
    if isinstance(value, Tensor):
        yield value.data_ptr()
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from addresses_in(item)
    elif isinstance(value, int):
        yield value


def tensors_and_addresses(direct: Any, replayed: Any) -> Iterator[tuple[Tensor, int]]:
    """What a call launches with, directly and replayed."""
    if isinstance(direct, Tensor):
        yield direct, replayed
    elif isinstance(direct, (tuple, list)):
        for own, other in zip(direct, replayed, strict=True):
            yield from tensors_and_addresses(own, other)


class Operations(TorchDispatchMode):
    """What torch is asked for, and the arguments of this package's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.allocated = 0  # bytes
        self.operators: list[tuple[str, tuple[Any, dict[str, Any]]]] = []  # given in order, and by name

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, result = function._schema.name, function(*args, **(kwargs or {}))
        self.names.append(name)
        if name.startswith("specens::") and name.endswith("_triton"):
            self.operators.append((name, (args, kwargs or {})))
        elif name.startswith("aten::empty"):
            self.allocated += result.nbytes
        return result


class Names:
    """Of tensors, by where their memory begins: those that a call is given, then others as they come."""

    def __init__(self, given: Any) -> None:
        self.indices: dict[int, int] = {}
        self.of(given)

    def of(self, value: Any, like: Any = None) -> Any:
        """like: what a direct call has there, which tells addresses from other numbers."""
        if isinstance(value, Tensor):
            return self.of_address(value.data_ptr())
        if isinstance(like, Tensor):
            return self.of_address(value)
        if isinstance(value, (tuple, list)):
            likes = like if isinstance(like, (tuple, list)) else [None] * len(value)
            return tuple(itertools.starmap(self.of, zip(value, likes, strict=True)))
        if isinstance(value, dict):
            return tuple(self.of(item) for item in value.values())
        return value.value if isinstance(value, tl.constexpr) else value

    def of_address(self, address: int) -> tuple[str, int]:
        return "tensor", self.indices.setdefault(address, len(self.indices))


class Copies:
    """Copies of tensors, in memory that is laid out and shared as before."""

    def __init__(self) -> None:
        self.storages: dict[int, Any] = {}
        self.tensors: dict[int, Tensor] = {}

    def of(self, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return [self.of(item) for item in value]
        if isinstance(value, dict):
            return {name: self.of(item) for name, item in value.items()}
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self.tensors:
            storage = value.untyped_storage()
            own = self.storages.setdefault(storage.data_ptr(), storage.clone())
            layout = value.storage_offset(), value.shape, value.stride()
            self.tensors[id(value)] = torch.empty(0, dtype=value.dtype).set_(own, *layout)
        return self.tensors[id(value)]


def launcher_of(operator: str) -> Callable[..., Any]:
    name, out = operator.removeprefix("specens::").removesuffix("_triton"), "_out_" in operator
    module = importlib.import_module(f"specens_kernels.ops.{name.removesuffix('_out')}.triton_kernel")
    return torch.no_grad()(writing(module.launch) if out else module.launch)


def test_a_replayed_call_launches_what_a_direct_one_does_on_its_own_tensors(launched):
    with Operations() as operations:
        for seed in SEEDS:
            for call in calls_of(seed):
                call()
    assert len({name for name, _ in operations.operators}) == 7
    replayed_calls = 0
    for operator, given in operations.operators:
        direct, others = launcher_of(operator), Copies().of(given)
        replays = replayed(direct)
        seen, of_direct = [], None
        for call, arguments in ((direct, given), (replays, given), (replays, given), (replays, others)):
            launched.clear()
            names = Names(arguments)
            results = call(*arguments[0], **arguments[1])
            of_direct = of_direct or launched.copy()
            layouts = [(own.shape, own.stride(), own.dtype) for own in tensors_in(results)]
            seen.append((names.of(launched, of_direct), names.of(results), layouts))
            if call is replays:
                replayed_calls += len(launched)
        assert seen[0] == seen[1] == seen[2] == seen[3], operator
    assert replayed_calls > 300


def test_one_tensor_for_two_arguments_is_another_call(launched):
    logits, numbers = torch.zeros(2, 2112), torch.arange(2)
    for positions in (numbers, numbers, numbers, numbers + 5):
        launched.clear()
        sample(logits, seeds=numbers, positions=positions, backend="triton")
        _, _, arguments = launched[-1]
        assert {numbers.data_ptr(), positions.data_ptr()} <= set(addresses_in(arguments))


def test_recordings_hold_no_tensor():
    def call() -> Tensor:
        logits = torch.zeros(3, 4, 2112)
        for _ in range(3):
            seeds = torch.arange(3)
            verify_chain(logits, torch.zeros(3, 3, dtype=torch.int64), seeds=seeds, positions=seeds, backend="triton")
        return weakref.ref(logits)

    logits = call()
    gc.collect()
    assert logits() is None


def everyday_calls(batch: int = 8, draft_len: int = 5, vocab: int = 32768) -> dict[str, Callable[[], Any]]:
    logits = torch.zeros(batch, draft_len + 1, vocab, dtype=torch.bfloat16)
    tokens, draft = torch.zeros(batch, draft_len, dtype=torch.int64), logits[:, 1:].contiguous()
    random_numbers = {"seeds": torch.arange(batch), "positions": torch.arange(batch) + 1}
    filters = Sampling(torch.ones(batch), torch.full((batch,), 50), torch.full((batch,), 0.95))
    penalties = Processing(repetition_penalty=torch.full((batch,), 1.1), output_tokens=torch.zeros(batch, 40).long())
    integers = [torch.empty(batch, dtype=torch.int64) for _ in range(3)]
    parents = torch.arange(-1, draft_len - 1).repeat(batch, 1)
    siblings = {"draft_logits": logits, "siblings": "without_replacement"}
    out = Verdict(torch.empty(batch, draft_len + 1).long(), *integers, None, torch.empty(batch, dtype=torch.int32))

    def verify(**changes: Any) -> Callable[[], Any]:
        given = {"draft_logits": draft, "out": out, "backend": "triton"} | random_numbers | changes
        return lambda: verify_chain(logits, tokens, **given)

    return {
        "plain": verify(),
        "filtered": verify(sampling=filters),
        "penalties": verify(processing=penalties),
        "block": verify(rule="block"),
        "typical": verify(rule="typical"),
        "gumbel": verify(rule="gumbel", draft_logits=None),
        "replacement": verify(rule=Replacement(0.5, 2.0)),
        "tree": lambda: verify_tree(logits, tokens, parents, **siblings, **random_numbers, backend="triton"),
        "sample": lambda: sample(logits[:, 0], **random_numbers, backend="triton"),
    }


@pytest.mark.parametrize("name", everyday_calls(1, 1, 64))
def test_a_second_call_copies_nothing_from_the_host_waits_for_nothing_and_allocates_scratch_alone(name):
    call = everyday_calls()[name]
    call()
    for _ in range(3):  # direct once more, then recorded, then replayed
        with Operations() as operations:
            call()
        forbidden = {"lift_fresh", "_local_scalar_dense", "nonzero", "item", "equal", "is_nonzero"}
        assert not {name.removeprefix("aten::") for name in operations.names} & forbidden
        assert operations.allocated <= MOST_SCRATCH * 48 * 32768 * 2


def calls_with_buffers(workspace: Workspace | None) -> dict[str, Callable[[], Any]]:
    """Of every operation and kind of scratch memory."""
    batch, nodes = 8, 5
    logits = torch.zeros(batch, nodes + 1, 4096, dtype=torch.bfloat16)
    tokens, parents = torch.zeros(batch, nodes, dtype=torch.int64), torch.arange(-1, nodes - 1).repeat(batch, 1)
    numbers = torch.arange(batch)
    random_numbers = {"seeds": numbers, "positions": numbers + 1}
    filters = Sampling(torch.ones(batch), torch.full((batch,), 50), torch.full((batch,), 0.95))
    short = {"seeds": numbers.int(), "positions": numbers.int() + 1}  # kernels read int64
    tree = {"siblings": "without_replacement", "draft_logits": logits}
    caches, kept = [torch.zeros(batch, 2, 16, 8) for _ in range(2)], torch.arange(nodes).expand(batch, -1)
    step = {"step": numbers}
    given: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
        "plain": (verify_chain, (logits, tokens), {"draft_logits": logits[:, 1:], **random_numbers}),
        "filtered": (verify_chain, (logits, tokens), {"sampling": filters, "drafter": 0, **random_numbers}),
        "block": (verify_chain, (logits, tokens), {"rule": "block", "drafter": 0, **random_numbers}),
        "typical": (verify_chain, (logits, tokens), {"rule": "typical", "top_logprobs": 2, **random_numbers}),
        "gumbel": (verify_chain, (logits, tokens), {"rule": "gumbel", "logprobs": True, **random_numbers}),
        "replacement": (verify_chain, (logits, tokens), {"rule": Replacement(0.5, 2.0), "drafter": 0}),
        "converted": (verify_chain, (logits, tokens.int()), {"draft_lens": numbers.int() % 5, **short}),
        "tree": (verify_tree, (logits, tokens, parents), {**tree, **random_numbers}),
        "token tree": (verify_tree, (logits, tokens, TokenTree.chains(1, nodes)), {"rule": "gumbel", **random_numbers}),
        "sample": (sample, (logits[:, 0],), {"sampling": filters, **random_numbers}),
        "sample, best": (sample, (logits[:, 0],), {"method": "gumbel", "count": 3, "logprobs": True, **random_numbers}),
        "target_logprobs": (target_logprobs, (logits,), {"sampling": filters}),
        "uniforms": (uniforms, tuple(random_numbers.values()), step),
        "tree_mask": (tree_mask, (parents, numbers), {"layout": "packed"}),
        "compact_kv": (compact_kv, (caches, kept, numbers % 4), {}),
    }

    def with_buffers(function: Callable[..., Any], arguments: Any, options: Any) -> Callable[[], Any]:
        results = function(*arguments, **options, backend="triton")
        lone = isinstance(results, Tensor)
        out = (
            torch.empty_like(results)
            if lone
            else type(results)(*(None if own is None else torch.empty(own.shape, dtype=own.dtype) for own in results))
        )
        return lambda: function(*arguments, **options, out=out, workspace=workspace, backend="triton")

    return {name: with_buffers(*own) for name, own in given.items()}


def allocated_by(call: Callable[[], Any]) -> int:
    with torch.profiler.profile(profile_memory=True) as profile:
        call()
    return sum(max(0, event.self_cpu_memory_usage) for event in profile.key_averages())


def test_with_buffers_and_a_workspace_a_second_call_allocates_nothing():
    workspace = Workspace()
    calls, without = calls_with_buffers(workspace), calls_with_buffers(None)
    for call in calls.values():
        call()
    held = workspace.nbytes
    assert {name: allocated_by(call) for name, call in calls.items() if allocated_by(call)} == {}
    assert 0 < workspace.nbytes == held
    for _ in range(2):
        assert sum(map(allocated_by, without.values())) > 0  # the profiler would see it


def test_scratch_memory_that_calls_launch_with_does_not_overlap(launched):
    for workspace in (Workspace(), None):
        for name, call in calls_with_buffers(workspace).items():
            launched.clear()
            with replays.off():
                call()
            direct = launched.copy()
            for _ in range(3):
                launched.clear()
                call()
            sizes: dict[int, int] = {}
            for tensor, address in tensors_and_addresses(direct, launched):
                if address != tensor.data_ptr():  # no argument
                    sizes[address] = max(sizes.get(address, 0), tensor.nbytes)
            starts = sorted(start for start, nbytes in sizes.items() if nbytes)
            assert all(start + sizes[start] <= after for start, after in itertools.pairwise(starts)), name


def wrong_calls() -> Iterator[Any]:
    for argument, changes in (*wrong.WRONG_LOGITS, *wrong.WRONG_TARGETS, *wrong.WRONG_UNIFORMS, *wrong.WRONG_ROUNDS):
        yield argument, wrong.verify, changes
    for argument, changes in (*wrong.WRONG_LOGITS, *wrong.WRONG_TARGETS, *wrong.WRONG_UNIFORMS):
        yield argument, wrong.draw, wrong.first_rows(changes)
    for argument, changes in wrong_trees.WRONG:
        yield argument, wrong_trees.verify, changes


def test_a_wrong_call_is_refused_after_right_ones_like_it():
    for call in (wrong.verify, wrong.draw, wrong_trees.verify):
        for _ in range(3):
            call(backend="triton")
    for argument, call, changes in wrong_calls():
        wrong.assert_named(argument, call, {"backend": "triton"} | changes)


def test_only_the_first_of_calls_that_are_alike_is_checked(monkeypatch):
    module = importlib.import_module("specens_kernels.ops.verify_chain")
    checked, check = [], module.check
    monkeypatch.setattr(module, "check", lambda call: checked.append(call) or check(call))
    for sampling in (Sampling(0.7), Sampling(0.9)):
        before = len(checked)
        for _ in range(4):
            wrong.verify(sampling=sampling, backend="triton")
        assert 1 <= len(checked) - before <= 2  # where it is seen, and where it is recorded
    out = wrong.verify(backend="triton")
    for _ in range(3):
        wrong.verify(backend="triton", out=out)
    shared = out._replace(num_tokens=out.num_accepted)
    wrong.assert_named("out.num_tokens", wrong.verify, {"out": shared, "backend": "triton"})
    wrong.assert_named(
        "out.num_tokens", wrong.verify, {"out": out._replace(num_tokens=wrong.SEEDS), "backend": "triton"}
    )


def test_a_buffer_that_lies_in_weights_which_are_converted_is_refused_after_right_calls():
    """The operator is given a copy, in which no buffer lies."""
    logits, memory = torch.zeros(3, 64), torch.tensor([[0.5, 0.5]] * 3, dtype=torch.float64)
    apart = sample(logits, uniforms=torch.zeros(3), backend="triton")

    def call(**out: Tensor) -> None:
        mixture = Mixture(memory)
        given = {"ensemble": mixture, "uniforms": torch.zeros(3), "out": apart._replace(**out), "backend": "triton"}
        sample([logits, logits], **given)

    for _ in range(4):
        call()
    with pytest.raises(ValueError, match=r"out.tokens: expected memory of its own.*weights"):
        call(tokens=memory.view(torch.int64)[0, 0:1].expand(1).as_strided((3,), (1,)))


@pytest.mark.parametrize("packed", [False, True], ids=["Triton 3.6", "3.7 and later"])
def test_the_driver_is_handed_what_tritons_launcher_hands_it(packed):
    handed: list[tuple[Any, ...]] = []

    class Launcher:
        global_scratch_size = profile_scratch_size = 0

        def __init__(self) -> None:
            self.launch = lambda *given: handed.append(given)

        def __call__(self, *given: Any) -> None:
            first, own, arguments = given[:5], given[5:9], given[9:]
            self.launch(*first, False, None, *own, *((arguments,) if packed else arguments))

    class Compiled:
        function, packed_metadata, run = 11, (8, 1), Launcher()

    for arguments in ((1, 2), (3, (4, 5), 6)):
        call = launches.driver_call(Compiled, (5,))
        call.function(*call.before, 7, *call.after, *((arguments,) if call.packed else arguments))
        Compiled.run(5, 1, 1, 7, 11, (8, 1), None, None, None, *arguments)
        assert handed[-2] == handed[-1]
    Launcher.global_scratch_size = 16
    assert launches.driver_call(Compiled, (5,)).function is Compiled.run


def test_who_listens_to_launches_is_told_of_replayed_ones(launched, monkeypatch):
    call, told, start = everyday_calls()["plain"], [], NotCompiled.__getitem__
    for _ in range(3):
        call()
    monkeypatch.setattr(NotCompiled, "__getitem__", lambda own, grid: told.append(grid) or start(own, grid))
    launched.clear()
    call()
    assert told == []
    quiet = launched.copy()
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", print)
    launched.clear()
    call()
    assert told == [grid for _, grid, _ in quiet] == [grid for _, grid, _ in launched]


def test_a_compaction_is_checked_where_its_like_was_not_there_but_for_memory_that_caches_share(monkeypatch):
    module = importlib.import_module("specens_kernels.ops.compact_kv")
    checked, check = [], module.check
    monkeypatch.setattr(module, "check", lambda *given: checked.append(given) or check(*given))
    caches, kept, prefix_lens = (
        [torch.zeros(3, 2, 9, 8) for _ in range(4)],
        torch.arange(2).expand(3, 2),
        torch.zeros(3),
    )

    def call(**changes: Any) -> None:
        given = {"caches": caches, "kept": kept, "prefix_lens": prefix_lens.long()} | changes
        compact_kv(**given, backend="triton")

    for _ in range(5):
        call()
    assert 1 <= len(checked) <= 2  # where it is seen, and where it is recorded
    wrong_ones = {
        "caches": ([*caches[:3], caches[0]], [*caches[:3], caches[0].mT], [*caches[:3], caches[0][:2]]),
        "kept": (kept.float(), kept[0]),
        "prefix_lens": (prefix_lens, prefix_lens[:2].long()),
        "slot_dim": (-2.0, -1),
    }
    for name, values in wrong_ones.items():
        for value in values:
            with pytest.raises(ValueError, match=name):
                call(**{name: value})


@pytest.mark.parametrize("name", ["plain", "tree", "sample"])
def test_a_call_like_one_before_passes_by_the_dispatcher_where_nothing_listens(name, monkeypatch):
    call, replayed_calls = everyday_calls()[name], []

    def told(again: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: replayed_calls.append(again(*given)) or replayed_calls[-1]

    for _ in range(3):
        call()
    for operator, again in backend.AGAIN.items():
        monkeypatch.setitem(backend.AGAIN, operator, told(again))
    call()
    assert len(replayed_calls) == 1
    assert replayed_calls[0] is not backend.NOT_SEEN
    with Operations() as operations:
        call()
    with torch.profiler.profile() as profile:
        call()
    heard = [operations.names, [event.key for event in profile.key_averages()]]
    assert all(any(own.startswith("specens::") for own in names) for names in heard)
    assert len(replayed_calls) == 1


@pytest.mark.parametrize("case", host_time.cases("cpu"), ids=lambda case: case.name)
def test_a_call_like_one_before_runs_few_functions(case):
    assert host_time.functions(case.call) <= case.functions


def _lent(workspace: Workspace, tensor: Tensor) -> bool:
    return any(own.data_ptr() <= tensor.data_ptr() < own.data_ptr() + own.nbytes for own in workspace._memory)


def test_results_that_are_returned_lie_in_no_workspace():
    workspace, seeds = Workspace(), torch.arange(3)
    for method, count in (("inverse_cdf", None), ("gumbel", 2)):
        for _ in range(3):
            given = {"seeds": seeds, "positions": seeds, "logprobs": True, "top_logprobs": 2}
            drawn = sample(
                torch.zeros(3, 4096), method=method, count=count, **given, workspace=workspace, backend="triton"
            )
            assert not any(_lent(workspace, tensor) for tensor in tensors_in(tuple(drawn)))


def compilations(steps: int, step_of_engine: Callable[..., None], **more: Any) -> Counter[str]:
    del variants[:]
    forget_compiled()
    with replays.off():
        for step in range(steps):
            step_of_engine(random.Random(step), **more)
    return Counter(variant[0].__name__ for variant in variants)


VOCAB, LONGEST, LARGEST_BATCH = 1504, 5, 64  # a vocabulary that is, like large ones, a multiple of 16


def engine_step(
    choice: random.Random,
    penalties: bool = False,
    packed: bool = True,
    filters: bool = True,
    nodes: int | None = None,
) -> None:
    batch = choice.randint(1, LARGEST_BATCH)
    lens = [choice.randint(0, LONGEST) for _ in range(batch)]
    given: dict[str, Any] = {"sampling": Sampling(torch.ones(batch))}
    if filters:
        given["sampling"] = Sampling(torch.ones(batch), torch.full((batch,), 50), torch.full((batch,), 0.95))
    given |= {"seeds": torch.arange(batch), "positions": torch.arange(batch) + 1, "backend": "triton"}
    if penalties:
        tables = [torch.zeros(batch, choice.randint(200, 1200), dtype=torch.int64) for _ in range(2)]
        bias = torch.zeros(batch, choice.randint(0, 40))
        given["processing"] = Processing(
            logit_bias=(bias.long(), bias),
            repetition_penalty=torch.full((batch,), 1.1),
            prompt_tokens=tables[0],
            output_tokens=tables[1],
        )
    if nodes is not None:
        logits = torch.zeros(batch, nodes + 1, VOCAB, dtype=torch.bfloat16)
        parents = torch.randint(-2, 3, (batch, nodes)).clamp(max=torch.arange(nodes) - 1)
        tokens, lens = torch.zeros(batch, nodes, dtype=torch.int64), torch.randint(nodes + 1, (batch,))
        siblings = {"draft_logits": logits, "siblings": "without_replacement"}
        verify_tree(logits, tokens, parents, num_nodes=lens, **siblings, **given)
        return
    if not packed:
        logits = torch.zeros(batch, LONGEST + 1, VOCAB, dtype=torch.bfloat16)
        tokens = torch.zeros(batch, LONGEST, dtype=torch.int64)
        verify_chain(logits, tokens, draft_lens=torch.tensor(lens), draft_logits=logits[:, 1:].contiguous(), **given)
        return
    rows = sum(lens) + batch
    offsets = torch.tensor([0, *(length + 1 for length in lens)]).cumsum(0)
    verify_chain(
        torch.zeros(rows, VOCAB, dtype=torch.bfloat16),
        torch.zeros(rows - batch, dtype=torch.int64),
        row_offsets=offsets,
        max_draft_len=LONGEST,
        draft_logits=torch.zeros(LARGEST_BATCH, LONGEST, VOCAB, dtype=torch.bfloat16),
        draft_slots=torch.arange(batch),
        **given,
    )


def cache_step(choice: random.Random, paged: bool) -> None:
    """The mask before a forward, and what is kept of its cache, which grows."""
    batch, nodes, slots = choice.randint(1, LARGEST_BATCH), 12, choice.randint(20, 400)
    parents, prefix = torch.full((batch, nodes), -1), torch.zeros(batch, dtype=torch.int64)
    tree_mask(parents, prefix, max_prefix=slots, backend="triton")
    kept = torch.zeros(batch, 5, dtype=torch.int64)
    table = {"block_table": torch.zeros(batch, slots // 16 + 1, dtype=torch.int32)} if paged else {}
    shape = (512, 16, 2, 64) if paged else (batch, 2, slots, 64)
    compact_kv(torch.zeros(shape, dtype=torch.bfloat16), kept, prefix, **table, backend="triton")


STEPS_OF_ENGINES = (
    {"packed": False},
    {},
    {"penalties": True},
    {"penalties": True, "packed": False},
    {"filters": False},
    {"nodes": 12, "penalties": True},
    {"nodes": 12, "filters": False},
)


@pytest.mark.parametrize("more", STEPS_OF_ENGINES, ids=str)
def test_kernels_are_compiled_for_no_batch_and_no_table(more):
    found = compilations(STEPS, engine_step, **more)
    assert len(found) >= 2, found
    assert max(found.values()) <= MOST_COMPILATIONS, found


@pytest.mark.parametrize("paged", [False, True])
def test_kernels_are_compiled_for_no_batch_and_no_length_of_a_cache(paged):
    found = compilations(STEPS, cache_step, paged=paged)
    assert len(found) >= 2, found
    assert max(found.values()) <= 4, found  # masks of narrow and wide rows, with 16-byte stores or without


def test_warmup_compiles_what_calls_need_and_launches_nothing(launched):
    calls = everyday_calls(4, 3, 4096)
    forget_compiled()
    assert warmup(*calls.values(), workers=2) == len(launches.COMPILED) > 8
    assert launched == []
    del variants[:]
    for call in calls.values():
        call()
    assert variants == []
    assert launched
    assert warmup(*calls.values()) == 0
    assert warmup(*(call for seed in SEEDS[::4] for call in calls_of(seed))) > 20


def test_what_is_compiled_first_is_what_the_checks_launch(monkeypatch):
    monkeypatch.setattr(backend, "READY", backend.READY.copy())
    prefer_triton()
    forget_compiled()
    warmup(*compile_first.calls(torch.device("cpu"), dry=True, quick=False), workers=1)
    assert len(launches.COMPILED) > 50
    del variants[:]
    for case in checks.cases():
        checks.outcome(case, checks.arguments_of(case, 1), None)
    assert variants == []


def test_calls_start_dependent_launches_where_that_is_asked_for(launched, monkeypatch):
    """What was compiled or recorded otherwise is not taken for it, nor the other way round."""
    monkeypatch.setattr(launches, "has_dependent_launches", lambda _: True)
    options = []
    compiled = launches.compile_options
    monkeypatch.setattr(launches, "compile_options", lambda launch: options.append(compiled(launch)) or options[-1])
    forget_compiled()
    call, seen = everyday_calls()["plain"], []
    for dependent in (False, True, False):
        for _ in range(3):  # launched, recorded, replayed
            launched.clear()
            with launches.dependent_launches(dependent):
                call()
            seen.append((dependent, {arguments[-1] for _, _, arguments in launched}))
    assert all(found == {dependent} for dependent, found in seen)
    assert sum("launch_pdl" in given for given in options) == len(launched)
