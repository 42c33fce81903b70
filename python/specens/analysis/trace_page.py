"""A trace as one HTML page that needs nothing else: the texts by proposer, what the tests said, and the time."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from specens.analysis.html_bars import Bar, bars
from specens.analysis.model_names import short_names
from specens.analysis.page_style import style_sheet
from specens.analysis.trace_reader import Totals, Trace, TracedText, add_up, was_rejected

OUTSIDE_NAME = "a drafter that is no member"


def render_page(trace: Trace) -> str:
    """The page's text; whatever models and tokens are called is shown and never read as HTML."""
    names = short_names(trace.run["models"])
    totals = add_up(trace.rounds, len(names))
    title = f"{trace.run['schedule']}: {' and '.join(names)}"
    sections = "".join(_text_section(text, names) for text in trace.texts)
    torn = '<p class="faint">The last line of the file was cut off and is not shown.</p>' if trace.torn else ""
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{style_sheet(len(names))}</style></head><body>'
        f"<h1>{escape(title)}</h1>{_facts(trace)}{torn}{_legend(names, totals)}{_member_table(names, totals)}"
        f'<div class="charts">{_acceptance_chart(totals)}{_time_chart(names, totals)}</div>'
        '<input type="checkbox" id="rejected"><label for="rejected"> show rejected drafts</label>'
        f"<main>{sections}</main></body></html>\n"
    )


def _facts(trace: Trace) -> str:
    lens = ", ".join(map(str, trace.run["draft_lens"]))
    drafts = f"trees {trace.run['tree']}" if "tree" in trace.run else f"draft lengths {lens}"
    return f'<p class="faint">{escape(trace.run["ensemble"])}, {escape(drafts)}</p>'


def _legend(names: Sequence[str], totals: Totals) -> str:
    parts = [f'<span class="p{index}">draft of {escape(name)}</span>' for index, name in enumerate(names)]
    if totals.accepted[-1]:
        parts.append(f'<span class="outside">draft of {OUTSIDE_NAME}</span>')
    parts += ['<span class="recovered">recovered after a rejection</span>', '<span class="bonus">bonus</span>']
    return f'<p class="legend">{" ".join(parts)} <span class="faint">point at a token to see its round</span></p>'


def _member_table(names: Sequence[str], totals: Totals) -> str:
    head = "".join(f"<th>{name}</th>" for name in ("", "forwards", "ms a forward", "tested", "accepted", "acceptance"))
    rows = []
    for index, name in enumerate(names):
        forwards = totals.forwards[index]
        mean = 1000 * totals.forward_seconds[index] / forwards if forwards else 0.0
        rows.append([name, str(forwards), f"{mean:.1f}", *_acceptance_cells(totals, index)])
    if totals.tested[-1]:
        rows.append([OUTSIDE_NAME, "", "", *_acceptance_cells(totals, -1)])
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    seconds = sum(totals.phases.values())
    mean_tokens = totals.num_tokens / totals.num_rounds if totals.num_rounds else 0.0
    summary = [
        f"{totals.num_tokens} tokens in {totals.num_rounds} rounds ({mean_tokens:.2f} a round)",
        f"{totals.kinds['recovered']} recovered, {totals.kinds['bonus']} bonus",
        f"{seconds:.2f} s of work" + (f" ({totals.num_tokens / seconds:.1f} tokens/s)" if seconds else ""),
    ]
    return (
        f'<p>{", ".join(summary)}</p><table class="members"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    )


def _acceptance_cells(totals: Totals, index: int) -> list[str]:
    tested, accepted = totals.tested[index], totals.accepted[index]
    return [str(tested), str(accepted), f"{accepted / tested:.2f}" if tested else "-"]


def _acceptance_chart(totals: Totals) -> str:
    indices = [
        Bar(str(index), accepted / tested, f"{accepted / tested:.2f}", f"{accepted} accepted of {tested} tested")
        for index, (tested, accepted) in enumerate(totals.by_position, start=1)
    ]
    return bars(indices, "acceptance by place of the draft", 1.0) if indices else ""


def _time_chart(names: Sequence[str], totals: Totals) -> str:
    whole = sum(totals.phases.values())
    outside = whole - sum(totals.forward_seconds)
    parts = [Bar(phase, seconds, _seconds(seconds, whole)) for phase, seconds in totals.phases.items()]
    for index, (name, seconds) in enumerate(zip(names, totals.forward_seconds, strict=True)):
        parts.append(Bar(f"forwards of {name}", seconds, _seconds(seconds, whole), style=f"p{index}"))
    parts.append(Bar("outside forwards", outside, _seconds(outside, whole)))
    return bars(parts, "time by phase, and by what it was spent on")


def _seconds(seconds: float, whole: float) -> str:
    return f"{seconds:.2f} s, {seconds / whole:.0%}" if whole else "0 s"


def _text_section(text: TracedText, names: Sequence[str]) -> str:
    end = text.end or {}
    facts = [f"text {text.index}" + (f", sample {text.sample}" if text.sample else "")]
    facts.append(f"{sum(len(one['events']) for one in text.rounds)} tokens in {len(text.rounds)} rounds")
    facts += [f"{name} {end[key]}" for name, key in (("seed", "seed"), ("ended by", "finish_reason")) if key in end]
    rounds = "".join(_round(one, names) for one in text.rounds)
    unfinished = "" if text.end else " (not finished)"
    return f'<section><h2>{escape(", ".join(facts))}{unfinished}</h2><div class="text">{rounds}</div></section>'


def _round(one: dict[str, Any], names: Sequence[str]) -> str:
    events = [_event(event) for event in one["events"]]
    rejected = _rejected(one)
    events.insert(len(events) - was_rejected(one), f"<del>{escape(rejected)}</del>" if rejected else "")
    return f'<span class="round" title="{escape(_hint(one, names))}">{"".join(events)}</span>'


def _rejected(one: dict[str, Any]) -> str:
    """The text of the drafts that were not accepted; of a tree each of its rejected branches."""
    drafts = one["drafts"]
    if not one["tree"]:
        return "".join(draft["text"] for draft in drafts if not draft["accepted"])
    inner = {draft["parent"] for draft in drafts if not draft["accepted"]}
    leaves = [index for index, draft in enumerate(drafts) if not draft["accepted"] and index not in inner]
    branches = " | ".join(_branch(drafts, leaf) for leaf in leaves)
    return f" [{branches}] " if branches else ""


def _branch(drafts: Sequence[dict[str, Any]], leaf: int) -> str:
    """The text from where a branch left the accepted path to its last node."""
    text, index = "", leaf
    while index >= 0 and not drafts[index]["accepted"]:
        text, index = drafts[index]["text"] + text, drafts[index]["parent"]
    return text


def _event(event: dict[str, Any]) -> str:
    if event["kind"] == "draft accepted":
        style = "outside" if event["proposer"] is None else f"p{event['proposer']}"
    else:
        style = event["kind"] if event["kind"] in ("recovered", "bonus") else "drawn"
    return f'<span class="{style}">{escape(event["text"])}</span>'


def _hint(one: dict[str, Any], names: Sequence[str]) -> str:
    said = [f"round {one['number']}, from token {one['position']} on"]
    if one["tree"]:
        said.append(f"a tree of {len(one['drafts'])} nodes, {one['num_accepted']} accepted")
    for depth, draft in _from_the_root(one["drafts"]):
        who = OUTSIDE_NAME if draft["proposer"] is None else names[draft["proposer"]]
        fate = "accepted" if draft["accepted"] else "not accepted"
        said.append(f"{'  ' * depth}{draft['text']!r} (token {draft['token']}) of {who}: {fate}")
    said += [
        f"{event['text']!r} (token {event['token']}): {event['kind']}"
        for event in one["events"]
        if event["kind"] != "draft accepted"
    ]
    forwards = " + ".join(map(str, one["forwards"]))
    return "\n".join([*said, f"forwards {forwards}, {1000 * sum(one['seconds'].values()):.1f} ms"])


def _from_the_root(drafts: Sequence[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    """Each draft with its depth; the nodes of a tree with their children after them."""
    paths: list[tuple[int, ...]] = []
    for index, draft in enumerate(drafts):
        parent = draft["parent"]
        above = () if parent is None or parent < 0 else paths[parent]
        paths.append((*above, index))
    return [(len(path) - 1, drafts[path[-1]]) for path in sorted(paths)]
