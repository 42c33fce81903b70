"""verify_chain: from the raw logits of one or several models to the tokens that a speculative step emits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specens_kernels.arguments import (
    NO_DRAFTER,
    NO_LOGPROBS,
    SCHEMA,
    Draft,
    Rule,
    Target,
    coin_arguments,
    pack,
    report_arguments,
    sampling_arguments,
    target_arguments,
)
from specens_kernels.backend import implementations, select
from specens_kernels.checks import (
    check_logits,
    check_tensor,
    fail,
    member_list,
    refuse_for_triton,
)
from specens_kernels.ops.verify_chain import reference
from specens_kernels.ops.verify_chain.rules import RuleKind
from specens_kernels.types import INTEGER_DTYPES, Ensemble, Processing, Sampling, Synthetic, Typical, Verdict

RULES = {kind.name.lower(): int(kind) for kind in RuleKind}
IMPLEMENTATIONS = implementations("verify_chain", f"({SCHEMA}) -> Tensor[]", reference.verify_chain)
OUT_IMPLEMENTATIONS = implementations(
    "verify_chain_out",
    f"({SCHEMA}, Tensor(a!)[] out) -> ()",
    reference.verify_chain_out,
    room="verify_chain",
    launch="launch_out",
)


def verify_chain(
    member_logits: Tensor | Sequence[Tensor],
    draft_tokens: Tensor,
    *,
    ensemble: Ensemble | None = None,
    sampling: Sampling = Sampling(),
    drafter: int | Tensor | None = None,
    draft_logits: Tensor | None = None,
    draft_sampling: Sampling | None = None,
    rule: str | Typical | Synthetic = "token",
    draft_lens: Tensor | None = None,
    max_draft_len: int | None = None,
    row_offsets: Tensor | None = None,
    draft_slots: Tensor | None = None,
    processing: Processing | None = None,
    process_drafts: bool = True,
    allowed: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    uniforms: Tensor | None = None,
    logprobs: bool | str = False,
    top_logprobs: int = 0,
    out: Verdict | None = None,
    backend: str | None = None,
) -> Verdict:
    """Accept a prefix of each request's draft tokens and draw the token after it.

    Under the rules "token" and "block" the emitted tokens are distributed exactly as if each had been drawn from the
    target distribution: the ensemble's, after processing and sampling parameters. No host synchronisation; traceable by
    torch.compile(fullgraph=True).

    member_logits: float32, bfloat16 or float16 [batch, steps, vocab], a tensor or one a member (vocabularies may
        differ; a token outside a member's vocabulary has probability 0 there). steps is draft_len + 1 with a bonus row
        (a full acceptance emits one more token) or draft_len without. Any stride but in the vocabulary.
        With row_offsets: packed [rows, vocab].
    draft_tokens: int64 or int32 [batch, draft_len]. A chain ends at the first id that is -1 or outside the vocabularies
        of members and drafter; an id that only the drafter knows is rejected like any token of probability 0.
        With row_offsets also packed [drafts], where each request has one row more than drafts, or none has.
    ensemble: Mixture, LogitMixture or Contrastive; None for a single member.
    sampling: what the target distribution is drawn with.
    drafter: the member that drew the draft tokens from its own distribution: an index, or int64 or int32 like
        draft_tokens where several did (-1: none, one-hot). None with draft_logits None: one-hot (greedy, n-gram).
    draft_logits: an outside drafter's logits [batch, draft_len, vocab], or [drafts, vocab] for packed draft_tokens.
    draft_sampling: what the draft tokens were drawn with; default: as sampling. Temperature 0: one-hot.
    rule: "token"; "block" (whole prefixes are tested: longer accepted chains, as lossless); "typical" (accepts what the
        target finds likely enough; not lossless), or a Typical with settings of its own; "synthetic" (accepts at given
        rates, to plan capacity), or a Synthetic with rates of its own.
    draft_lens: int64 or int32 [batch], the drafts of each request, 0 to draft_len; default: all, and for packed rows
        one less than the rows of the request.
    max_draft_len: the most drafts of a request, which packed draft_tokens do not tell; only with them.
    row_offsets: int64 or int32 [batch + 1]: request b owns the rows row_offsets[b] to row_offsets[b + 1] - 1 of the
        packed logits, one for each draft and perhaps a bonus row. Rows behind the last offset are padding.
    draft_slots: int64 or int32 [batch]: draft_logits are kept as [slots, draft_len or more, vocab], and this is the
        slot of each request.
    processing: logit bias, penalties and min_tokens, for every member's logits at every row.
    process_drafts: whether the drafts were drawn from logits with the same processing and bit mask.
    allowed: int32 [batch, steps, words], or [rows, words] for packed rows: token v may be emitted at a row if bit
        v % 32 of word v // 32 is set; tokens beyond the words may not. The layout of xgrammar and llguidance.
    seeds, positions: int64 [batch]: random numbers by Philox; positions is the absolute position of the first draft.
    uniforms: float64 or float32 [batch, draft_len + 1] in [0, 1), instead of seeds and positions: a coin for each draft
        and, last, one for the next token. Where every request is greedy (temperature 0.0), neither is needed.
    logprobs: True or "target": also return log-probabilities of the emitted tokens under the target distribution; those
        of greedy requests are the ensemble's at temperature 1. "raw": under the ensemble at temperature 1, without
        filters and processing.
    top_logprobs: also return so many most likely tokens at each emitted one, under the same distribution.
    out: a Verdict of contiguous tensors to write into, which is returned; nothing else is allocated. Its optional
        fields are those that are asked for.
    backend: "reference", "cpp", "triton" or None (the fastest for the device).

    Returns a Verdict. Raises ValueError naming the argument that is wrong, NotImplementedError naming a parameter that
    is not served, RuntimeError where a backend that was asked for by name is not usable. What only the device can read
    (lengths, offsets, slots, per-request parameters) is checked there: `Status.INVALID_PARAMETER`.
    """
    members = member_list(member_logits, 3 if row_offsets is None else 2)
    device = members[0].device
    if row_offsets is not None:
        row_offsets = checked_integers("row_offsets", row_offsets, (None,), device)
        if len(row_offsets) < 1:
            fail("row_offsets", "batch + 1 offsets", "none")
    target = target_arguments(members, ensemble, sampling, processing, allowed, row_offsets)
    batch = members[0].shape[0] if row_offsets is None else row_offsets.shape[0] - 1
    drawn_with = target.sampling
    if draft_sampling is not None:
        drawn_with = sampling_arguments("draft_sampling", draft_sampling, batch, device)
    draft_len = chain_length(target, draft_tokens, max_draft_len, batch)
    source = draft_source(target, draft_tokens, drafter, draft_logits, draft_slots, draft_len)
    if draft_lens is not None:
        if draft_tokens.dim() == 1:
            fail("draft_lens", "None, as row_offsets tell the lengths of packed draft_tokens", "a tensor")
        draft_lens = checked_integers("draft_lens", draft_lens, (batch,), device)
    drafters, slots, index = source
    draft = Draft(
        draft_tokens, drafters, draft_logits, slots, draft_lens, index, draft_len, int(process_drafts), drawn_with
    )
    rule_group = rule_arguments(rule, draft_len)
    coinless = target.sampling.greedy and rule_group.kind != RuleKind.SYNTHETIC
    coins = coin_arguments(uniforms, seeds, positions, (batch, draft_len + 1), device, not coinless)
    report = report_arguments(logprobs, top_logprobs)
    table, room = (IMPLEMENTATIONS, "verify_chain") if out is None else (OUT_IMPLEMENTATIONS, "verify_chain_out")
    name, run = select(table, backend, device, room)
    if name == "triton":
        refuse_for_triton(target, draft, rule_group.kind, report)
    flat = pack(target, draft, drawn_with, coins, rule_group, report, rates=rule_group.rates)
    if out is not None:
        run(*flat, out_tensors(out, (batch, draft_len + 1), report.logprobs != NO_LOGPROBS, top_logprobs, device))
        return out
    tokens, num_accepted, num_tokens, next_token, status, *reported = run(*flat)
    emitted, top_tokens, top = (*reported, None, None, None)[:3]
    return Verdict(tokens, num_accepted, num_tokens, next_token, emitted, status, top_tokens, top)


def out_tensors(out: Verdict, shape: tuple[int, int], logprobs: bool, top: int, device: torch.device) -> list[Tensor]:
    """Check the buffers of a Verdict, and give them in the order of the operator's results."""
    if not isinstance(out, Verdict):
        fail("out", "a Verdict", type(out).__name__)
    batch = shape[:1]
    wanted = {"tokens": (shape, torch.int64), "num_accepted": (batch, torch.int64), "num_tokens": (batch, torch.int64)}
    wanted |= {"next_token": (batch, torch.int64), "status": (batch, torch.int32)}
    if logprobs:
        wanted["logprobs"] = (shape, torch.float32)
    if top:
        wanted |= {"top_tokens": ((*shape, top), torch.int64), "top_logprobs": ((*shape, top), torch.float32)}
    for name, (size, dtype) in wanted.items():
        buffer = getattr(out, name)
        check_tensor(f"out.{name}", buffer, size, (dtype,), device)
        if not buffer.is_contiguous():
            fail(f"out.{name}", "a contiguous tensor", f"strides {buffer.stride()}")
    for name in ("logprobs", "top_tokens", "top_logprobs"):
        if name not in wanted and getattr(out, name) is not None:
            fail(f"out.{name}", "None, as it was not asked for", "a tensor")
    return [getattr(out, name) for name in wanted]


def rule_arguments(rule: str | Typical | Synthetic, draft_len: int) -> Rule:
    """The code of a rule and its settings."""
    if rule in ("typical", "synthetic"):
        rule = Typical() if rule == "typical" else Synthetic()
    if isinstance(rule, Synthetic):
        rates = rule.acceptance_rates
        rates = rates if isinstance(rates, tuple) else (float(rates),) * draft_len
        if len(rates) != draft_len:
            fail("acceptance_rates", f"a rate for each of {draft_len} positions", f"{len(rates)} rates")
        return Rule(int(RuleKind.SYNTHETIC), 0.0, 0.0, rates)
    if isinstance(rule, Typical):
        return Rule(int(RuleKind.TYPICAL), rule.threshold, rule.alpha)
    if not isinstance(rule, str) or rule not in RULES:
        fail("rule", f"one of {', '.join(map(repr, RULES))}, a Typical or a Synthetic", repr(rule))
    return Rule(RULES[rule], 0.0, 0.0)


def chain_length(target: Target, draft_tokens: Tensor, max_draft_len: int | None, batch: int) -> int:
    """The most drafts of a request, by the shape of dense tokens or as told for packed ones."""
    members, device = target.member_logits, target.member_logits[0].device
    packed = target.row_offsets is not None and isinstance(draft_tokens, Tensor) and draft_tokens.dim() == 1
    if not packed:
        check_tensor("draft_tokens", draft_tokens, (batch, None), INTEGER_DTYPES, device)
        if max_draft_len is not None:
            fail("max_draft_len", "None, as draft_tokens are not packed", max_draft_len)
        steps, draft_len = members[0].shape[1], draft_tokens.shape[1]
        if target.row_offsets is None and steps not in (draft_len, draft_len + 1):
            fail("member_logits", f"draft_len = {draft_len} or draft_len + 1 steps", list(members[0].shape))
        return draft_len
    rows = members[0].shape[0]
    check_tensor("draft_tokens", draft_tokens, (None,), INTEGER_DTYPES, device)
    if draft_tokens.shape[0] not in (rows, rows - batch):
        fail("draft_tokens", f"{rows} drafts, or {rows - batch} with a bonus row each", list(draft_tokens.shape))
    if isinstance(max_draft_len, bool) or not isinstance(max_draft_len, int) or max_draft_len < 0:
        fail("max_draft_len", "the most drafts of a request, as draft_tokens are packed", max_draft_len)
    return max_draft_len


def draft_source(
    target: Target,
    draft_tokens: Tensor,
    drafter: int | Tensor | None,
    draft_logits: Tensor | None,
    draft_slots: Tensor | None,
    draft_len: int,
) -> tuple[Tensor | None, Tensor | None, int]:
    """Check what the draft tokens were drawn from: the drafters, the slots and the drafter's index."""
    device = target.member_logits[0].device
    index, drafters = drafter_arguments(drafter, draft_tokens, target.member_logits)
    if draft_logits is None:
        if draft_slots is not None:
            fail("draft_slots", "None, as there are no draft_logits", "a tensor")
        return drafters, None, index
    if drafter is not None:
        fail("drafter", "either drafter or draft_logits", "both")
    if draft_slots is None:
        check_logits("draft_logits", draft_logits, draft_tokens.shape, device)
        return drafters, None, index
    check_logits("draft_logits", draft_logits, (None, None), device)
    if draft_logits.shape[1] < draft_len:
        fail("draft_logits", f"[slots, {draft_len} or more, vocab]", list(draft_logits.shape))
    batch = target.member_logits[0].shape[0] if target.row_offsets is None else target.row_offsets.shape[0] - 1
    return drafters, checked_integers("draft_slots", draft_slots, (batch,), device), index


def checked_integers(argument: str, value: Tensor, shape: tuple[int | None, ...], device: torch.device) -> Tensor:
    """A contiguous int64 tensor of this shape."""
    check_tensor(argument, value, shape, INTEGER_DTYPES, device)
    return value.to(torch.int64).contiguous()


def drafter_arguments(
    drafter: int | Tensor | None, draft_tokens: Tensor, members: list[Tensor]
) -> tuple[int, Tensor | None]:
    """Check who drafted: the member's index, or NO_DRAFTER and perhaps an index a token."""
    if isinstance(drafter, Tensor):
        return NO_DRAFTER, checked_integers("drafter", drafter, draft_tokens.shape, members[0].device)
    if drafter is None:
        return NO_DRAFTER, None
    if not isinstance(drafter, int) or not 0 <= drafter < len(members):
        fail("drafter", f"a member's index from 0 to {len(members) - 1}", drafter)
    return drafter, None
