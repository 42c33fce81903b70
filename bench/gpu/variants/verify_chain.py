"""The launches of verify_chain for compilation without a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton.language as tl

from bench.gpu.variants.examples import (
    edited_dense_target,
    edited_target,
    example_draft,
    example_random,
    example_rule,
    example_targets,
    filtered_targets,
    packed_draft,
)
from specens_kernels.arguments import (
    NO_LOGPROBS,
    RAW_LOGPROBS,
    TARGET_LOGPROBS,
    Report,
)
from specens_kernels.ops.sample.triton_scores import SCORE_KERNELS, chain_found
from specens_kernels.ops.sample.triton_scores import launches as score_launches
from specens_kernels.ops.verify_chain import (
    triton_shard,
    triton_shard_report,
    triton_shard_rows,
    triton_shard_search,
    triton_shard_tree,
)
from specens_kernels.ops.verify_chain.triton_kernel import STREAM_NEXT, launches, new_outcome
from specens_kernels.ops.verify_chain.triton_report import (
    ReportView,
    emitted_rows,
    new_results,
    raw_report_launches,
)
from specens_kernels.ops.verify_chain.triton_rules import entropy_kernel, shares_kernel
from specens_kernels.parts.draft import DraftView, without_distribution
from specens_kernels.parts.launches import Launch
from specens_kernels.parts.rules import new_rule
from specens_kernels.parts.scores import score_view
from specens_kernels.parts.statistics import new_statistics
from specens_kernels.parts.target import TargetView, batch_of
from specens_kernels.rules import RuleKind


def variants() -> list[Launch]:
    """What is launched.

    Of filters, rules, edits, packed rows and reports the kernels after the statistics, for some targets and drafts.
    """
    found: list[Launch] = []
    for index, target in enumerate(example_targets()):
        found += _example_launches(target, example_draft(target, index), index, RuleKind.TOKEN)
    lone, mixture, contrast = filtered_targets()
    *_, masses, walked, residual, draw = _example_launches(contrast, example_draft(contrast, 2), 2, RuleKind.BLOCK)
    for kind in (RuleKind.BLOCK, RuleKind.TYPICAL):
        after = _example_launches(lone, example_draft(lone, 0), 0, kind)
        found += [launch for launch in after if launch.kernel in (shares_kernel, entropy_kernel)]
    found += [masses, walked, residual, draw, *_other_launches()]
    for target in (*example_targets()[::2], edited_target(), lone, mixture):
        found += _example_score_launches(target)
    found += [launch for index in (0, 2) for launch in _shard_launches(example_targets()[index], index)]
    trees = (edited_dense_target(), example_targets()[0], example_targets()[2])
    return found + [launch for index, target in enumerate(trees) for launch in _shard_tree_launches(target, index)]


def _shard_launches(target: TargetView, index: int) -> Iterator[Launch]:
    """Of a slice of the vocabulary, but for the pass over the logits; what is drawn from without filters and with."""
    own = triton_shard_rows.with_statistics(target, example_draft(target, index))
    numbers, row = triton_shard.new_numbers(own), example_random(0).seeds
    assert row is not None
    rows, shares = row[:, None], row[:, None].double()
    places = triton_shard_rows.places_of(rows, shares, numbers.sums, None)
    blocks = shares.new_empty(len(row), 1, own.statistics.blocks)
    drawn = {"blocks_ptr": blocks, "subtracts_ptr": row.to(torch.int8), "goals_ptr": row.double()}
    yield list(triton_shard.read_launches(numbers, own))[-1]
    yield from triton_shard.residual_launches(blocks, None, places, own)
    yield from triton_shard.draw_launches(row, drawn, places, own)
    kept = places._replace(least=numbers.sums.float())
    yield from triton_shard.residual_launches(blocks, None, kept, own)
    yield from triton_shard.residual_launches(blocks, drawn["subtracts_ptr"], kept, own)
    yield from triton_shard.draw_launches(row, drawn, kept, own)
    yield from triton_shard_rows.block_launches(triton_shard_report.shard_entropy_kernel, blocks, kept, own)
    logprobs = shares.new_empty(*rows.shape, own.target.vocab).float()
    scale = triton_shard_report.Scale(numbers.sums, numbers.sums)
    yield from triton_shard_report.logprob_launches(logprobs, kept, scale, own)
    likeliest = shares.new_empty(*rows.shape, own.statistics.blocks, 5)
    yield from triton_shard_report.top_launches(likeliest, likeliest.long(), kept, scale, own)
    yield from triton_shard_report.score_launches(shares, rows, kept, scale, own)
    found = triton_shard_search.Found(blocks[..., None], blocks[..., None], blocks[..., None].long(), 1)
    noise = triton_shard_search.Noise(row, rows, shares, 300)
    yield from triton_shard_search.best_launches(found, kept, noise, own)
    for of_drafts in (False, True):
        searched = triton_shard_search.searched_of(own, numbers.sums, of_drafts)
        shape = (len(row), searched.rows, own.statistics.blocks)
        sums, largest = shares.new_empty(*shape, 256), shares.new_empty(*shape, 50).float()
        of_rows = shares.new_empty(shape[:2])
        half, counts = tl.constexpr(of_drafts), tl.constexpr(not of_drafts)
        weights = triton_shard_search.Weights(of_rows, of_rows.float(), of_rows.long(), 8, half, counts)
        yield from triton_shard_search.bucket_launches(sums, searched, weights, own)
        logits = shares.new_empty(*shape[:2], own.target.vocab).float()
        yield from triton_shard_search.searched_launches(logits, of_rows.float(), searched, own)
        lasts, rests = sums[..., 0].contiguous().float(), sums[..., 0].contiguous()
        yield from triton_shard_search.largest_launches(largest, lasts, rests, searched, own)


def _shard_tree_launches(target: TargetView, index: int) -> Iterator[Launch]:
    """Of a slice of trees: what is told, searched and left."""
    drafts = example_draft(target, (0, 3, 2)[index])
    parents = torch.empty(batch_of(target), drafts.draft_len, dtype=torch.int64, device=target.logits[0].device)
    own = triton_shard_rows.with_statistics(*triton_shard_rows.along_paths(target, drafts, parents))
    numbers, row = triton_shard.new_numbers(own), example_random(0).seeds
    assert row is not None
    offers, shares = parents[..., None].double().expand(-1, -1, 2), row[:, None].double()
    blocks = shares.new_empty(len(row), 1, own.statistics.blocks)
    yield list(triton_shard.read_launches(numbers, own))[-1]
    for least in (None, numbers.sums.float()):
        places = triton_shard_rows.places_of(row[:, None], shares, numbers.sums, least, offers)
        yield from triton_shard_tree.left_launches(blocks, places, own)
        yield from triton_shard_tree.draw_left_launches(row, blocks, row.double(), places, own)
        yield from triton_shard_rows.block_launches(triton_shard_tree.draft_masses_kernel, blocks, places, own)
        ratios, sums = shares[..., None], blocks[..., None, None].expand(-1, -1, -1, 2, -1)
        yield from triton_shard_tree.exceeding_launches(sums, row[:, None], ratios, places, own)
    searched = triton_shard_search.searched_of(own, numbers.sums, True)
    largest = shares.new_empty(len(row), searched.rows, own.statistics.blocks, 50).float()
    lasts, rests = largest[..., 0].contiguous(), largest[..., 0].double().contiguous()
    yield from triton_shard_search.largest_launches(largest, lasts, rests, searched, own)


def _example_score_launches(target: TargetView) -> list[Launch]:
    """The kernels of the rule gumbel alone."""
    drafts = example_draft(target, 3) if target.row_offsets is None else packed_draft(target, False)
    draft, report = without_distribution(drafts), Report(NO_LOGPROBS, 0)
    statistics, random = new_statistics(target, draft), example_random(0)
    results = new_results(batch_of(target), draft.draft_len + 1, report, target.logits[0].device)
    scores = score_view(target, statistics, random.seeds, random.positions, False, chain=True)
    own = score_launches(chain_found(results, target.steps, False), scores, statistics, target, draft)
    return [launch for launch in own if launch.kernel in SCORE_KERNELS]


def _other_launches() -> Iterator[Launch]:
    """With edits and packed rows the kernels of two kinds of drafts; a synthetic draw, what compares, and a report."""
    target, lone = edited_target(), example_targets()[0]
    _, statistics, *_ = _example_launches(target, packed_draft(target, False), 1, RuleKind.TOKEN)
    *_, residual, _ = _example_launches(target, packed_draft(target, True), 0, RuleKind.TOKEN)
    *_, draw = _example_launches(lone, without_distribution(example_draft(lone, 1)), 1, RuleKind.SYNTHETIC)
    _, mixture, contrast = filtered_targets()
    *_, top, _ = _example_launches(mixture, example_draft(mixture, 0), 0, RuleKind.REPLACEMENT)
    *_, walked = _example_launches(contrast, example_draft(contrast, 2), 1, RuleKind.DECISION_TREE)
    yield from (statistics, residual, draw, top, walked, _report_launch())


def _example_launches(target: TargetView, draft: DraftView, index: int, kind: RuleKind) -> Iterator[Launch]:
    statistics = new_statistics(target, draft, all_tops=kind.compares)
    report = Report(NO_LOGPROBS if index % 2 else TARGET_LOGPROBS, 0)
    results = new_results(batch_of(target), draft.draft_len + 1, report, target.logits[0].device)
    outcome = new_outcome(results, statistics, kind, report.logprobs == TARGET_LOGPROBS)
    rule = new_rule(statistics, draft, example_rule(kind, draft.draft_len), batch_of(target))
    return launches(outcome, statistics, target, draft, rule, example_random(index), 0, STREAM_NEXT)


def _report_launch() -> Launch:
    """A report of raw logits, without data."""
    target = example_targets()[2]
    results = new_results(batch_of(target), target.steps, Report(RAW_LOGPROBS, 5), target.logits[0].device)
    tokens, _, num_tokens, _, _, logprobs, top_tokens, top_logprobs = results
    report = ReportView(tokens, target.steps, logprobs, top_tokens, top_logprobs, 5)
    *_, launch = raw_report_launches(report, target, emitted_rows(target, num_tokens))
    return launch
