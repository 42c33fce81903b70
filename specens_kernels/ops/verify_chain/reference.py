"""The definition of chain verification, in float64; the rules and their sources are in `rules`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specens_kernels.arguments import (
    NO_DRAFTER,
    NO_LOGPROBS,
    TARGET_LOGPROBS,
    ChainArguments,
    Draft,
    RandomSource,
    Target,
)
from specens_kernels.ops.sample.gumbel import best_tokens
from specens_kernels.ops.sample.reference import draw, empty_report, invalid_uniform, most_likely
from specens_kernels.ops.target_logprobs.processing import Paths, processed
from specens_kernels.ops.target_logprobs.reference import (
    Distributions,
    at_temperature,
    clean,
    ensemble_logprobs,
    filtered,
    one_hot,
    pad_vocab,
    parameters,
    raw,
    target_probs,
)
from specens_kernels.ops.uniforms.reference import uniforms as philox_uniforms
from specens_kernels.ops.verify_chain.layout import padded
from specens_kernels.ops.verify_chain.rules import Chain, apply_rule, at_tokens, leading
from specens_kernels.results import Status
from specens_kernels.rules import EMPTY_RESIDUAL_MASS, RuleKind


class DraftRows(NamedTuple):
    """What draft tokens were drawn from."""

    probs: Tensor  # float64 [batch, draft_len, vocab]
    drawn: Tensor  # bool [batch, draft_len], False: one-hot at the token
    status: Tensor  # int64 [batch, draft_len]


def draft_probs(target: Target, draft: Draft, vocab: int, greedy: Tensor) -> tuple[Tensor, Tensor]:
    """Draft distributions float64 [batch, draft_len, vocab] and their status [batch, draft_len]."""
    rows = draft_rows(target, draft, vocab, greedy, draft.tokens.long())
    return rows.probs, rows.status


def draft_rows(target: Target, draft: Draft, vocab: int, greedy: Tensor, before: Tensor | Paths) -> DraftRows:
    """What each draft token was drawn from; before: the tokens before the rows.

    One-hot where the target is greedy, where the draft's temperature is 0, and where there is no usable distribution.
    """
    tokens = draft.tokens.long()
    draft_len = tokens.shape[1]
    tokens_one_hot = one_hot(tokens, vocab)
    if draft.logits is None and draft.drafters is None and draft.drafter == NO_DRAFTER:
        return DraftRows(tokens_one_hot, torch.zeros_like(tokens, dtype=torch.bool), torch.zeros_like(tokens))

    def cleaned(logits: Tensor) -> tuple[Tensor, Tensor]:
        if draft.processed:
            allowed = None if target.allowed is None else target.allowed[:, :draft_len]
            logits = processed(logits, target.processing, allowed, before)
        return clean(logits)

    members = [logits[:, :draft_len] for logits in target.member_logits]
    if draft.drafters is None:
        logits, bits = cleaned(draft.logits if draft.logits is not None else members[draft.drafter])
        known, given = torch.ones_like(tokens, dtype=torch.bool), torch.ones_like(tokens, dtype=torch.bool)
    else:
        widest = max(logits.shape[-1] for logits in members)
        all_members = [cleaned(member) for member in members]
        stack = torch.stack([pad_vocab(values, widest, -math.inf) for values, _ in all_members], 2)
        member = draft.drafters.long().clamp(0, len(members) - 1)[..., None]  # [batch, draft_len, 1]
        logits = stack.gather(2, member[..., None].expand(-1, -1, -1, widest))[:, :, 0]
        bits = torch.stack([row_bits for _, row_bits in all_members], 2).gather(2, member)[..., 0]
        given = draft.drafters != NO_DRAFTER
        known = (draft.drafters >= NO_DRAFTER) & (draft.drafters < len(members))
    own = parameters(draft.sampling, tokens)
    soft = given & ~(greedy | own.greedy | own.invalid)[:, None]
    usable = known & (logits.amax(-1) > -math.inf)
    status = torch.where(soft, torch.where(known, bits, 0) | ~usable * Status.INVALID_DRAFT_DISTRIBUTION, 0)
    probs = filtered(at_temperature(logits, own.temperature), own.filters).exp()
    drawn = soft & usable
    return DraftRows(torch.where(drawn[..., None], pad_vocab(probs, vocab, 0.0), tokens_one_hot), drawn, status)


def chain_uniforms(source: RandomSource, num_accepted: Tensor | None, like: Tensor) -> Tensor:
    """The uniforms of the tests, float64 [batch, draft_len], or with num_accepted that of the next token [batch]."""
    uniforms, seeds, positions = source
    batch, draft_len = like.shape
    if uniforms is not None:
        return (uniforms[:, :draft_len] if num_accepted is None else uniforms[:, draft_len]).double()
    if seeds is None or positions is None:
        return torch.zeros(like.shape if num_accepted is None else (batch,), dtype=torch.float64, device=like.device)
    if num_accepted is not None:
        return philox_uniforms(seeds, positions, num_accepted, 1)
    steps = torch.arange(draft_len, device=like.device).expand(batch, -1)
    return philox_uniforms(seeds[:, None].expand_as(like), positions[:, None].expand_as(like), steps, 0)


def best_scores(source: RandomSource, rows: Distributions) -> Tensor:
    """The tokens of the best Gumbel scores, int64 [batch, rows]; row j is `positions` + j."""
    positions = source.positions
    if positions is not None:
        positions = positions[:, None] + torch.arange(rows.logprobs.shape[1], device=positions.device)
    return best_tokens(rows, source.seeds, positions, 1)[..., 0]


def pick_row(values: Tensor, row: Tensor) -> Tensor:
    """values[b, row[b]], zero where that row is not there; values [batch, rows, vocab]."""
    batch, rows, _ = values.shape
    return torch.nn.functional.pad(values, (0, 0, 0, 1))[torch.arange(batch, device=row.device), row.clamp(max=rows)]


def prefix_status(status: Tensor, last: Tensor) -> Tensor:
    """The union of status[b, 0..last[b]]; status [batch, rows]."""
    return status_of(status, torch.arange(status.shape[1], device=status.device) <= last[:, None])


def status_of(status: Tensor, used: Tensor) -> Tensor:
    """The union of each request's status [batch, rows] where it is used, [batch]."""
    total = torch.zeros(status.shape[0], dtype=torch.int64, device=status.device)
    for bit in Status:
        total = total | ((status & bit) != 0).logical_and(used).any(1) * bit
    return total


def chain_end(draft: Draft, lens: Tensor, vocab: int) -> Tensor:
    """int64 [batch]: the drafts before the first id that is no token.

    A token that only an outside drafter has is a draft like others, of target probability 0.
    """
    vocab = vocab if draft.logits is None else max(vocab, draft.logits.shape[-1])
    valid = (draft.tokens >= 0) & (draft.tokens < vocab)
    return torch.minimum(valid.int().cumprod(1).sum(1), lens.clamp(0, draft.tokens.shape[1]))


def verify_chain(*given: Any, **options: Any) -> list[Tensor]:
    """tokens, num_accepted, num_tokens, next_token, status, and what is reported; see `Verdict`."""
    arguments = ChainArguments.of(*given, **options)
    chain_target, chain_draft, lens, num_rows, invalid = padded(arguments.target, arguments.draft)
    draft_tokens = chain_draft.tokens.long()
    rows = ensemble_logprobs(chain_target, draft_tokens)
    target = target_probs(rows)
    vocab = target.shape[-1]
    draft, draft_status = draft_probs(chain_target, chain_draft, vocab, rows.greedy)
    end = chain_end(chain_draft, lens, vocab)
    kind = RuleKind(arguments.rule.kind)
    picked = rows.most_likely
    if kind == RuleKind.GUMBEL:
        picked = best_scores(arguments.random_numbers, rows)
    without_random = rows.greedy | kind.picks
    tested = without_random & (not kind.tests_greedy)
    random_numbers = torch.where(tested[:, None], 0.0, chain_uniforms(arguments.random_numbers, None, draft_tokens))
    chain = Chain(target, draft, draft_tokens, random_numbers, end, picked)
    accepted = apply_rule(chain, arguments.rule)
    num_accepted = accepted.num_accepted
    if not kind.tests_greedy:  # greedy requests take the most likely token, whatever the rule
        num_accepted = torch.where(rows.greedy, leading(at_tokens(target, draft_tokens) > 0, end), num_accepted)

    # the next token: from the residual after a rejection, from the target after the whole chain, or what the row picks
    if kind.picks:
        target = one_hot(picked, vocab) * (target > 0).any(-1, keepdim=True)
    has_row = num_accepted < num_rows
    rejected = num_accepted < end
    row_target = pick_row(target, num_accepted)
    residual = (accepted.target_share[:, None] * row_target - pick_row(draft, num_accepted)).clamp(min=0)
    subtracts = rejected & kind.subtracts
    empty = subtracts & (residual.sum(-1) <= EMPTY_RESIDUAL_MASS) & (row_target.sum(-1) > 0)
    uniform = torch.where(without_random, 0.0, chain_uniforms(arguments.random_numbers, num_accepted, draft_tokens))
    masses = torch.where((subtracts & ~empty)[:, None], residual, row_target)
    next_token = torch.where(has_row, draw(masses, uniform), -1)

    status = prefix_status(rows.status, torch.where(has_row, num_accepted, num_accepted - 1))
    if kind.reads_draft:
        status = status | prefix_status(draft_status, torch.where(rejected, num_accepted, num_accepted - 1))
    status = status | empty * Status.EMPTY_RESIDUAL
    status = status | ((num_accepted == end) & (end < lens)) * Status.INVALID_DRAFT_TOKEN
    invalid = invalid | rows.invalid | parameters(chain_draft.sampling, draft_tokens).invalid
    invalid = invalid | bad_uniforms(random_numbers, uniform, lens)
    verdict = as_verdict(draft_tokens, num_accepted, next_token, status, invalid)
    if arguments.report.logprobs == NO_LOGPROBS:
        return verdict
    logprobs = rows.logprobs
    if arguments.report.logprobs != TARGET_LOGPROBS:
        logprobs = ensemble_logprobs(raw(chain_target)).logprobs
    tokens = verdict[0]
    logprobs = torch.nn.functional.pad(logprobs, (0, 0, 0, tokens.shape[1] - logprobs.shape[1]))
    return [*verdict, *most_likely(logprobs, arguments.report.top, tokens)]


def as_verdict(
    drafts: Tensor, num_accepted: Tensor, next_token: Tensor, status: Tensor, invalid: Tensor
) -> list[Tensor]:
    """tokens, num_accepted, num_tokens, next_token, status; of a request with a wrong parameter nothing is emitted.

    drafts: int64 [batch, n], those that are accepted first.
    """
    status = torch.where(invalid, Status.INVALID_PARAMETER, status)
    num_accepted = torch.where(invalid, 0, num_accepted)
    next_token = torch.where(invalid, -1, next_token)
    tokens = emitted_tokens(drafts, num_accepted, next_token)
    return [tokens, num_accepted, num_accepted + (next_token >= 0), next_token, status.int()]


def empty_verdict(*given: Any, **options: Any) -> list[Tensor]:
    """Tensors of the shapes that `verify_chain` gives, whose hundreds of steps take a tracer long."""
    arguments = ChainArguments.of(*given, **options)
    _, draft, *_ = padded(arguments.target, arguments.draft)
    batch, draft_len = draft.tokens.shape
    tokens = draft.tokens.new_empty((batch, draft_len + 1), dtype=torch.int64)
    counts = [tokens.new_empty(batch) for _ in range(3)]
    status = tokens.new_empty(batch, dtype=torch.int32)
    return [tokens, *counts, status, *empty_report(arguments.report, tokens, tokens.shape)]


def bad_uniforms(random_numbers: Tensor, next_uniform: Tensor, lens: Tensor) -> Tensor:
    """bool [batch]: whether a uniform that a request may need is out of range."""
    tested = torch.arange(random_numbers.shape[1], device=random_numbers.device) < lens[:, None]
    return (invalid_uniform(random_numbers) & tested).any(1) | invalid_uniform(next_uniform)


def emitted_tokens(draft_tokens: Tensor, num_accepted: Tensor, next_token: Tensor) -> Tensor:
    """int64 [batch, draft_len + 1]: the accepted drafts, the next token, then -1."""
    tokens = torch.nn.functional.pad(draft_tokens, (0, 1), value=-1)
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    tokens = torch.where(columns < num_accepted[:, None], tokens, -1)
    return torch.where(columns == num_accepted[:, None], next_token[:, None], tokens)
