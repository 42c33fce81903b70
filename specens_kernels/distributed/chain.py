"""Chains whose rows lie on several ranks: `specens_kernels.ops.verify_chain.reference`, with what it sums told."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from specens_kernels.arguments import (
    NO_LOGPROBS,
    ChainArguments,
    Draft,
    RandomSource,
    Report,
    Rule,
    Target,
)
from specens_kernels.distributed.draw import (
    Choice,
    Drawn,
    Masses,
    Reports,
    draw_steps,
    mass_steps,
    picked_steps,
    reported,
    top_steps,
)
from specens_kernels.distributed.reads import noise_at, read_rows
from specens_kernels.distributed.shard import Shard, shifted
from specens_kernels.distributed.slices import Places, SlicedChoice, Slices, by_parts, entropies, least_of, residuals
from specens_kernels.distributed.steps import Steps, together
from specens_kernels.distributed.target import (
    DraftRows,
    Looked,
    Rows,
    always_greedy,
    draft_steps,
    invalid_draft,
    kernels_verify,
    masses_here,
    probabilities,
    scores_need_no_sums,
    without_source,
)
from specens_kernels.distributed.written import is_written, lone_draft
from specens_kernels.ops.target_logprobs.reference import one_hot, parameters
from specens_kernels.ops.verify_chain.layout import padded
from specens_kernels.ops.verify_chain.reference import (
    as_verdict,
    bad_uniforms,
    chain_uniforms,
    pick_row,
    prefix_status,
)
from specens_kernels.ops.verify_chain.rules import TESTS, Tested, entropy, leading, typical_limit
from specens_kernels.results import Status
from specens_kernels.rules import EMPTY_RESIDUAL_MASS, RuleKind


class Call(NamedTuple):
    """What is known before anything is told."""

    shard: Shard
    kind: RuleKind
    rule: Rule
    report: Report
    random: RandomSource
    target: Target  # dense; processing as the shard sees it
    draft: Draft
    tokens: Tensor  # int64 [batch, draft_len], of the whole vocabulary
    here: Tensor  # likewise, as the shard sees them
    end: Tensor  # int64 [batch], drafts before the first that is no token
    lens: Tensor  # int64 [batch]
    num_rows: Tensor  # int64 [batch]
    invalid: Tensor  # bool [batch]

    @property
    def draft_len(self) -> int:
        return self.tokens.shape[1]

    @property
    def by_best(self) -> bool:
        """Whether a row has one token for all requests: of the best score, or the most likely."""
        return self.kind == RuleKind.GUMBEL or (always_greedy(self.target) and not self.kind.tests_greedy)

    @property
    def direct(self) -> bool:
        """Whether that is all that is told of rows."""
        return self.by_best and scores_need_no_sums(self.target) and self.report.logprobs == NO_LOGPROBS


class Seen(NamedTuple):
    """What all ranks know of the rows, but for their local log-probabilities."""

    rows: Rows
    draft: DraftRows
    told: Rows  # whose log-probabilities are reported
    reports: Reports
    picked: Tensor  # int64 [batch, rows], the most likely token or that of the best score
    of_picked: Tensor | None  # float64 [batch, rows], their reported log-probabilities
    at_target: Tensor  # float64 [batch, draft_len], probabilities of the drafts
    at_draft: Tensor  # likewise
    slices: Slices | None  # where kernels read the rows, whose local log-probabilities nobody knows

    @property
    def of_places(self) -> tuple[Tensor, Tensor | None]:
        """The masses and least logits of `Places`."""
        assert self.slices is not None
        least = least_of(self.rows.parts.least, self.draft.least, self.slices.numbers)
        return by_parts(self.rows.parts.whole, self.draft.masses, -1.0), least


def prepare(shard: Shard, arguments: ChainArguments) -> Call:
    target, draft, lens, num_rows, invalid = padded(arguments.target, arguments.draft)
    target = target._replace(processing=shifted(shard, target.processing))
    tokens = draft.tokens.long()
    known = shard.vocab if draft.logits is None else max(shard.vocab, shard.draft_size)
    end = torch.minimum(((tokens >= 0) & (tokens < known)).int().cumprod(1).sum(1), lens.clamp(0, tokens.shape[1]))
    invalid = invalid | invalid_draft(shard, draft)
    kind, rule, source = RuleKind(arguments.rule.kind), arguments.rule, arguments.random_numbers
    own = shard.own(tokens)
    return Call(shard, kind, rule, arguments.report, source, target, draft, tokens, own, end, lens, num_rows, invalid)


def slices_of(call: Call) -> Slices | None:
    """The rows as kernels read them, where these can; None: torch."""
    draft = call.draft if call.kind.reads_draft else without_source(call.draft)
    if call.direct and call.target.plausibility == 0:
        return None
    if not kernels_verify(call.shard, call.target, draft, call.kind, call.report):
        return None
    if is_written(call.target, call.kind.compares):
        draft = lone_draft(call.shard, call.target, draft, call.here, call.draft_len)
    return Slices(call.shard, call.target, draft, call.here)


def chain_steps(shard: Shard, arguments: ChainArguments) -> Steps[list[Tensor]]:
    """What `verify_chain` of the whole vocabulary gives, on every rank."""
    call = prepare(shard, arguments)
    seen = yield from read_steps(call)
    accepted = yield from accept_steps(call, seen)
    if call.report.logprobs == NO_LOGPROBS:
        verdict, _ = yield from finish_steps(call, seen, accepted)
        return verdict
    rows = torch.arange(call.draft_len + 1, device=call.tokens.device).expand(len(call.tokens), -1)
    parts = finish_steps(call, seen, accepted), top_steps(seen.reports, rows, call.report.top)
    (verdict, of_next), top = yield from together(*parts)
    is_next = rows == accepted.drafts[:, None]
    of_drafts = torch.nn.functional.pad(seen.told.looked_up, (0, 1))
    return [*verdict, *reported(torch.where(is_next, of_next[:, None], of_drafts), verdict[0], top)]


def read_steps(call: Call) -> Steps[Seen]:
    """The rows of target and drafts; side by side, so that they take as many collectives as the longer of them."""
    shard, tokens, before, n = call.shard, call.tokens, call.here, call.draft_len
    looked = Looked(before, torch.arange(n, device=tokens.device).expand_as(tokens))
    drafts, slices = None, slices_of(call)
    if call.kind.reads_draft and not always_greedy(call.target) and not call.direct:
        of_drafts = call.target._replace(
            member_logits=[logits[:, :n] for logits in call.target.member_logits],
            allowed=None if call.target.allowed is None else call.target.allowed[:, :n],
        )
        greedy = parameters(call.target.sampling, tokens).greedy
        drafts = draft_steps(shard, of_drafts, call.draft, greedy, before, looked, slices)
    noise = noise_at(call.kind, call.random, torch.arange(call.target.member_logits[0].shape[1], device=tokens.device))
    how: dict[str, Any] = {"direct": call.direct, "drafts": drafts, "slices": slices}
    read = yield from read_rows(shard, call.target, tokens, before, looked, noise, call.kind, call.report, **how)
    is_picked = ((tokens == read.picked[:, :n]) & read.rows.alive[:, :n]).double()
    at_target = is_picked
    if not call.by_best:
        at_target = torch.where(read.rows.greedy[:, None], is_picked, read.rows.looked_up.exp())
    at_draft = torch.where(read.draft.drawn, read.draft.looked_up.exp(), 1.0)
    return Seen(*read, at_target, at_draft, read.rows.slices)


class Accepted(NamedTuple):
    drafts: Tensor  # int64 [batch], how many
    share: Tensor  # float64 [batch], the target's part in the residual after a rejection
    masses: Masses | None  # of all rows, where ranks have told them


def accept_steps(call: Call, seen: Seen) -> Steps[Accepted]:
    """How many drafts are accepted. Where ranks tell each other more of the rows for it, they tell all masses."""
    kind, rule, rows = call.kind, call.rule, seen.rows
    share = torch.ones_like(rows.greedy, dtype=torch.float64)
    most_likely = leading(seen.at_target > 0, call.end)
    if call.by_best:
        return Accepted(most_likely, share, None)
    uniforms, masses = tested_uniforms(call, rows), None if rows.of_ranks is None else Masses.of_target(rows.of_ranks)
    if kind == RuleKind.BLOCK:
        num_accepted, share, masses = yield from block_steps(call, seen, uniforms)
    else:
        limit = None
        if kind == RuleKind.TYPICAL:
            own, none = masses_here(call.shard, seen.rows), share.new_zeros(len(share), 0)
            masses, of_rows = yield from mass_steps(call.shard, none, own, entropies_here(call, seen))
            limit = typical_limit(of_rows, rule)
        num_accepted = leading(TESTS[kind](tested_drafts(call, seen, uniforms, limit), rule), call.end)
    if not kind.tests_greedy:
        num_accepted = torch.where(rows.greedy, most_likely, num_accepted)
    return Accepted(num_accepted, share, masses)


def tested_uniforms(call: Call, rows: Rows) -> Tensor:
    """float64 [batch, draft_len]; 0 where nothing is tested by them."""
    if call.by_best and call.random.uniforms is None:
        return torch.zeros_like(call.tokens, dtype=torch.float64)
    without = (rows.greedy | call.kind.picks) & (not call.kind.tests_greedy)
    return torch.where(without[:, None], 0.0, chain_uniforms(call.random, None, call.tokens))


def tested_drafts(call: Call, seen: Seen, uniforms: Tensor, limit: Tensor | None) -> Tested:
    """What rules look at that judge each draft by itself."""
    best = torch.where(seen.rows.alive, seen.rows.best.exp(), 0.0)[:, : call.draft_len]
    is_picked = call.tokens == seen.picked[:, : call.draft_len]
    return Tested(seen.at_target, seen.at_draft, uniforms, is_picked, best, limit)


def block_steps(call: Call, seen: Seen, uniforms: Tensor) -> Steps[Accepted]:
    """`block_rule`, whose masses of residuals are summed over the shards: a collective.

    These are also the masses that the next token is drawn by.
    """
    n = call.draft_len
    ratio = torch.where(seen.at_target > 0, seen.at_target / seen.at_draft, 0.0)
    shares = [torch.ones_like(call.end, dtype=torch.float64)]
    for length in range(1, n + 1):
        own = torch.where(shares[-1] > 0, shares[-1] * ratio[:, length - 1], 0.0)
        shares.append(own.clamp(max=1))
    if seen.slices is None:
        left = [residual(call, seen, shares[length], torch.full_like(call.end, length)).sum(-1) for length in range(n)]
        own = torch.stack([*left, torch.zeros_like(shares[0])], 1)
    else:
        rows = torch.arange(n, device=call.end.device).expand_as(call.tokens).contiguous()
        places = Places(rows, torch.stack(shares, 1)[:, :n].contiguous(), *seen.of_places)
        own = torch.nn.functional.pad(residuals(seen.slices, places).sum(-1), (0, 1))
    masses, _ = yield from mass_steps(call.shard, own, masses_here(call.shard, seen.rows))
    mass = masses.residual.sum(0)
    num_accepted, accepted_share = torch.zeros_like(call.end), shares[0]
    for length in range(1, n + 1):
        rest = mass[:, length] + 1 - shares[length]
        keeps = torch.where(rest > EMPTY_RESIDUAL_MASS, mass[:, length] / rest, 1.0)
        keeps = torch.where((call.end == length) | (length == n), shares[length], keeps)
        longer = (uniforms[:, length - 1] < keeps) & (length <= call.end)
        num_accepted = torch.where(longer, length, num_accepted)
        accepted_share = torch.where(longer, shares[length], accepted_share)
    return Accepted(num_accepted, accepted_share, masses)


def entropies_here(call: Call, seen: Seen) -> Tensor:
    """This rank's part of those of the drafts' rows, float64 [batch, draft_len]."""
    if seen.slices is None:
        return entropy(probabilities(call.shard, seen.rows)[:, : call.draft_len])
    rows = torch.arange(call.draft_len, device=call.end.device).expand_as(call.tokens).contiguous()
    return entropies(seen.slices, Places(rows, torch.ones_like(rows, dtype=torch.float64), *seen.of_places))


def residual(call: Call, seen: Seen, share: Tensor, row: Tensor) -> Tensor:
    """max(share * target - draft, 0) of this rank's tokens at a row [batch], float64 [batch, width]."""
    target = pick_row(probabilities(call.shard, seen.rows), row)
    if call.draft_len == 0:
        return share[:, None] * target
    width = target.shape[-1]
    index = row.clamp(max=call.draft_len - 1)
    request = torch.arange(len(row), device=row.device)
    own = one_hot(call.here[request, index], width)
    drawn = seen.draft.drawn[request, index]
    draft = torch.where(drawn[:, None], seen.draft.logprobs[request, index].exp(), own)
    draft = torch.where((row < call.draft_len)[:, None], draft, 0.0)
    return (share[:, None] * target - draft).clamp(min=0)


def next_steps(call: Call, seen: Seen, accepted: Accepted, uniform: Tensor) -> Steps[Drawn]:
    """From the residual after a rejection, from the target after the whole chain, or what the row picks."""
    rows, num_accepted, reports = seen.rows, accepted.drafts, call.report.logprobs != NO_LOGPROBS
    row = num_accepted.clamp(max=rows.alive.shape[1])
    alive = pick_row(rows.alive[..., None], row)[:, 0] & (num_accepted < call.num_rows)
    picked = torch.where(alive, pick_row(seen.picked[..., None], row)[:, 0], -1)
    logprobs = seen.reports.of_row(num_accepted) if reports else None
    if call.kind.picks or always_greedy(call.target):
        of_picked = None if seen.of_picked is None else pick_row(seen.of_picked[..., None], row)[:, 0]
        return (yield from picked_steps(call.shard, picked, of_picked, logprobs))
    subtracts = (num_accepted < call.end) & call.kind.subtracts & ~rows.greedy
    masses = None if accepted.masses is None else accepted.masses.at(num_accepted)
    if seen.slices is None:
        target = pick_row(probabilities(call.shard, rows), num_accepted)
        left = residual(call, seen, accepted.share, num_accepted) if call.kind.subtracts else target
        choice = Choice(left, target, subtracts, uniform, logprobs, call.shard.start)
        drawn = yield from draw_steps(call.shard, choice, masses)
    else:
        places = Places(num_accepted[:, None], accepted.share[:, None].contiguous(), *seen.of_places)
        own = pick_row(masses_here(call.shard, seen.rows)[..., None], num_accepted)[:, 0]
        left = residuals(seen.slices, places)[:, 0] if call.kind.subtracts else seen.slices.nothing_left
        certain = torch.where(rows.greedy, picked, -1)
        sliced = SlicedChoice(seen.slices, places, left, own, subtracts, uniform, logprobs, certain)
        drawn = yield from draw_steps(call.shard, sliced, masses)
    return drawn._replace(tokens=torch.where(num_accepted < call.num_rows, drawn.tokens, -1))


def finish_steps(call: Call, seen: Seen, accepted: Accepted) -> Steps[tuple[list[Tensor], Tensor]]:
    """What is emitted, with its status, and the next token's reported log-probability [batch]."""
    rows, num_accepted = seen.rows, accepted.drafts
    uniform = torch.zeros_like(accepted.share)
    if not call.by_best or call.random.uniforms is not None:
        uniform = chain_uniforms(call.random, num_accepted, call.tokens)
        uniform = torch.where(rows.greedy | call.kind.picks, 0.0, uniform)
    drawn = yield from next_steps(call, seen, accepted, uniform)
    has_row, rejected = num_accepted < call.num_rows, num_accepted < call.end
    status = prefix_status(rows.status, torch.where(has_row, num_accepted, num_accepted - 1))
    if call.kind.reads_draft:
        status = status | prefix_status(seen.draft.status, torch.where(rejected, num_accepted, num_accepted - 1))
    status = status | drawn.empty * Status.EMPTY_RESIDUAL
    status = status | ((num_accepted == call.end) & (call.end < call.lens)) * Status.INVALID_DRAFT_TOKEN
    invalid = call.invalid | rows.invalid | bad_uniforms(tested_uniforms(call, rows), uniform, call.lens)
    return as_verdict(call.tokens, num_accepted, drawn.tokens, status, invalid), drawn.logprobs
