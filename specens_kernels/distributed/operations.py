"""The entry points: arguments as the operations of one device take them, and where the shard lies."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import specens_kernels.ops.sample as sample_operation
import specens_kernels.ops.target_logprobs as score_operation
import specens_kernels.ops.verify_chain as chain_operation
import specens_kernels.ops.verify_tree as tree_operation
from specens_kernels.arguments import ChainArguments, TreeArguments
from specens_kernels.distributed.chain import chain_steps
from specens_kernels.distributed.groups import Exchange
from specens_kernels.distributed.rows import sample_steps, score_steps
from specens_kernels.distributed.shard import Shard, check_size, sizes_of, without_padding
from specens_kernels.distributed.steps import Steps, run
from specens_kernels.distributed.tree import tree_steps
from specens_kernels.distributed.tree_offers import rounds_of
from specens_kernels.ops.verify_chain.checks import ChainCall
from specens_kernels.ops.verify_tree.checks import TreeCall
from specens_kernels.results import Draw, Verdict
from specens_kernels.values import fail

if TYPE_CHECKING:
    from specens_kernels._host import TokenTree

PLACE = ("vocab_start", "vocab_size", "draft_vocab_size", "max_top_k")


def verify_chain(
    member_logits: Tensor | Sequence[Tensor], draft_tokens: Tensor, *, group: Any = None, **arguments: Any
) -> Verdict:
    """`specens_kernels.verify_chain` of rows whose vocabulary lies on several ranks.

    Every rank calls it with the same arguments but for its slices of logits, and gets the same Verdict: that of the
    whole rows, but where a decision hangs on how sums round. All arguments are those of `specens_kernels.verify_chain`
    but for out, workspace and backend; tokens, `allowed` and `processing` name tokens of the whole vocabulary.

    member_logits: float32, bfloat16 or float16 [batch, steps, shard], a tensor or one a member; packed [rows, shard].
        Slices may differ in length, be padded (what lies beyond vocab_size is not looked at) or empty.
    vocab_start: the first token of this rank's slices, of all members. Slices of ranks do not overlap.
    vocab_size: the tokens of the whole vocabulary, or one number a member.
    draft_logits: a slice likewise. draft_vocab_size: the drafter's vocabulary; None: that of the members.
    max_top_k: the most that top_k is, where that is a tensor on a device; a request with more is invalid.
    group: None (torch.distributed's default group), a ProcessGroup, or an object whose `all_gather(tensor)` gives the
        tensors of all ranks, stacked or one after the other.

    The number of collectives and the bytes of each are known from arguments and shapes (docs/distributed.md). Raises
    ValueError naming the argument that is wrong, and what the group raises where a rank is lost.
    """
    return _run(chain_of(member_logits, draft_tokens, **arguments), group, arguments)


def verify_tree(
    member_logits: Tensor | Sequence[Tensor],
    draft_tokens: Tensor,
    parents: Tensor | TokenTree | Sequence[TokenTree],
    *,
    group: Any = None,
    **arguments: Any,
) -> Verdict:
    """`specens_kernels.verify_tree` of rows whose vocabulary lies on several ranks; see `verify_chain` of this module.

    Where children were drawn, each collective judges one more of every node's children: give TokenTrees, or parents on
    the CPU, whose number of children is known; for a tensor on a device there are as many collectives as nodes. Under
    the rule 'k_seq' two judge all of them, unless a tensor says who drafted each.
    """
    return _run(tree_of(member_logits, draft_tokens, parents, **arguments), group, arguments)


def sample(member_logits: Tensor | Sequence[Tensor], *, group: Any = None, **arguments: Any) -> Draw:
    """`specens_kernels.sample` of rows [batch, shard] whose vocabulary lies on several ranks; see `verify_chain`."""
    return _run(draw_of(member_logits, **arguments), group, arguments)


def target_logprobs(member_logits: Tensor | Sequence[Tensor], *, group: Any = None, **arguments: Any) -> Tensor:
    """`specens_kernels.target_logprobs` of rows whose vocabulary lies on several ranks; see `verify_chain`.

    Returns this rank's slice, float32 like the widest of its slices of logits: -inf beyond the vocabulary.
    """
    return _run(scores_of(member_logits, **arguments), group, arguments)


def _run(steps: Steps[Any], group: Any, arguments: dict[str, Any]) -> Any:
    with torch.no_grad():
        return run(steps, Exchange(group, arguments["vocab_start"]))


def _options(operation: Callable[..., Any], given: dict[str, Any], of_draft: bool = True) -> dict[str, Any]:
    """The keyword arguments of an operation, those not given as by default, and what says where the shard lies."""
    parameters = inspect.signature(operation).parameters.values()
    options = {own.name: own.default for own in parameters if own.kind is inspect.Parameter.KEYWORD_ONLY}
    index = PLACE if of_draft else (*PLACE[:2], *PLACE[3:])
    unknown = given.keys() - options.keys() - set(index)
    missing = [name for name in PLACE[:2] if name not in given]
    if unknown or missing:
        wrong = f"an unexpected keyword argument {min(unknown)!r}" if unknown else f"no keyword argument {missing[0]!r}"
        raise TypeError(f"distributed.{operation.__name__}() got {wrong}")
    for name in ("out", "workspace", "backend"):
        if given.get(name) is not None:
            fail(name, "None, which slices of the vocabulary do not take", type(given[name]).__name__)
    return options | dict.fromkeys(PLACE) | given


def _taken(member_logits: Any, options: dict[str, Any]) -> tuple[Shard, list[Any], dict[str, Any]]:
    """The shard, the members' logits without padding, and the operation's own arguments, likewise."""
    start, vocab_size, draft_vocab_size, max_top_k = (options.pop(name) for name in PLACE)
    members = [member_logits] if isinstance(member_logits, Tensor) else list(member_logits)
    start, sizes = check_size("vocab_start", start, 0), sizes_of(vocab_size, len(members))
    draft_size = max(sizes) if draft_vocab_size is None else check_size("draft_vocab_size", draft_vocab_size, 1)
    most = None if max_top_k is None else check_size("max_top_k", max_top_k, 1)
    members = [without_padding(logits, start, size) for logits, size in zip(members, sizes)]
    slices = list(members)
    if options.get("draft_logits") is not None:
        options["draft_logits"] = without_padding(options["draft_logits"], start, draft_size)
        slices.append(options["draft_logits"])
    width = max((value.shape[-1] for value in slices if isinstance(value, Tensor) and value.dim() > 0), default=1)
    return Shard(start, sizes, draft_size, width, most), members, options


def _then(steps: Steps[Any], make: Callable[..., Any]) -> Steps[Any]:
    results = yield from steps
    return make(results)


def chain_of(member_logits: Any, draft_tokens: Tensor, **arguments: Any) -> Steps[Verdict]:
    """`verify_chain` as a computation that knows no group; its arguments are checked at once."""
    shard, members, options = _taken(member_logits, _options(chain_operation.verify_chain, arguments))
    call = ChainCall(member_logits=members, draft_tokens=draft_tokens, **options)
    chain_operation.check(call)
    given, packed = chain_operation._pack(call, members)
    return _then(chain_steps(shard, ChainArguments.of(*given, **packed)), _verdict)


def _verdict(results: list[Tensor]) -> Verdict:
    tokens, num_accepted, num_tokens, next_token, status, *reported = results
    emitted, top_tokens, top = (*reported, None, None, None)[:3]
    return Verdict(tokens, num_accepted, num_tokens, next_token, emitted, status, top_tokens, top)


def tree_of(member_logits: Any, draft_tokens: Tensor, parents: Any, **arguments: Any) -> Steps[Verdict]:
    """`verify_tree` likewise."""
    shard, members, options = _taken(member_logits, _options(tree_operation.verify_tree, arguments))
    call = TreeCall(member_logits=members, draft_tokens=draft_tokens, parents=parents, **options)
    tree_operation.check(call)
    given, packed = tree_operation._pack(call, members)
    rounds = rounds_of(parents, draft_tokens, call.rule == "traversal")
    steps = tree_steps(shard, TreeArguments.of(*given, **packed), rounds)
    return _then(steps, lambda results: _verdict([*results[:5], *results[6:]])._replace(path=results[5]))


def draw_of(member_logits: Any, **arguments: Any) -> Steps[Draw]:
    """`sample` likewise."""
    shard, members, options = _taken(member_logits, _options(sample_operation.sample, arguments, of_draft=False))
    options["num_best"] = options.pop("count")
    call = sample_operation.SampleCall(member_logits=members, **options)
    sample_operation._check(call)
    given, packed = sample_operation._pack(call, members)

    def drawn(results: list[Tensor]) -> Draw:
        tokens, status, *told = results
        emitted, top_tokens, top = (*told, None, None, None)[:3]
        if call.method == "gumbel" and call.num_best is None:
            tokens, emitted = tokens[:, 0], None if emitted is None else emitted[:, 0]
        return Draw(tokens, emitted, status, top_tokens, top)

    return _then(sample_steps(shard, *given, **packed), drawn)


def scores_of(member_logits: Any, **arguments: Any) -> Steps[Tensor]:
    """`target_logprobs` likewise."""
    options = _options(score_operation.target_logprobs, arguments, of_draft=False)
    shard, members, options = _taken(member_logits, options)
    call = score_operation.ScoreCall(member_logits=members, **options)
    score_operation._check(call)
    given, packed = score_operation._pack(call, members)
    slices = [member_logits] if isinstance(member_logits, Tensor) else member_logits
    width, one_row = max(logits.shape[-1] for logits in slices), slices[0].dim() == 2

    def scored(logprobs: Tensor) -> Tensor:
        missing = max(0, width - logprobs.shape[-1])
        logprobs = torch.nn.functional.pad(logprobs, (0, missing), value=-torch.inf)[..., :width]
        return logprobs[:, 0] if one_row else logprobs

    return _then(score_steps(shard, *given, **packed), scored)
