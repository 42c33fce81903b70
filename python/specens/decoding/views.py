"""How a Generation looks in a session and in a notebook."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specens.decoding.request import Event
    from specens.generate import Generation

SHOWN = 60  # characters of a text in its repr
HUES = (210, 30, 280, 150)  # of members, by their place
STYLES = {
    "recovered": "border-bottom:2px solid #ef4444",
    "bonus": "border-bottom:2px solid #10b981",
    "standard": "",
}


def generation_repr(generation: Generation) -> str:
    """One line: the beginning of the text, how long it is, why it ended, its seed."""
    text = generation.text if len(generation.text) <= SHOWN else generation.text[: SHOWN - 1] + "…"
    return f"Generation({text!r}, {_told(generation)})"


def generation_html(generation: Generation) -> str:
    """The text, each token in the colour of the member that drafted it, and a line of what the text cost."""
    spans = "".join(map(_span, generation.events))
    legend = "background: who drafted it; red line: drawn after a rejection; green: after a fully accepted chain"
    return (
        f'<div style="white-space:pre-wrap;line-height:1.7">{spans}</div>'
        f'<div style="color:#6b7280;font-size:85%" title="{legend}">{escape(_told(generation))}</div>'
    )


def _told(generation: Generation) -> str:
    accepted = generation.statistics.acceptance_rate
    drafts = "" if accepted is None else f", {accepted:.0%} of tested drafts accepted"
    return f"{len(generation.tokens)} tokens, {generation.finish_reason}{drafts}, seed {generation.seed}"


def _span(event: Event) -> str:
    style = STYLES.get(event.kind, "")
    if event.kind == "draft accepted":
        hue = HUES[(event.proposer or 0) % len(HUES)]
        style = f"background:hsl({hue} 80% 60% / {0.3 if event.proposer is not None else 0.15})"
    who = f" by member {event.proposer}" if event.proposer is not None else ""
    chance = f", log-probability {event.logprob:.2f}" if event.logprob is not None else ""
    return f'<span style="{style}" title="{escape(event.kind)}{who}{chance}">{escape(event.text)}</span>'
