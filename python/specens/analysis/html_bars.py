"""Bar charts as HTML tables, so that names wrap and nothing is cut off, however narrow the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Bar:
    """A value with its name, what is written at it, a longer text that is shown when it is pointed at, and a class."""

    name: str
    value: float
    label: str
    hint: str = ""
    style: str = "plain"


def bars(rows: Sequence[Bar], title: str, highest: float | None = None) -> str:
    """Bars below each other. highest: the value that fills the width, by default the largest."""
    full = max((bar.value for bar in rows), default=0.0) if highest is None else highest
    body = "".join(_row(bar, full) for bar in rows)
    return f'<figure><figcaption>{escape(title)}</figcaption><table class="bars"><tbody>{body}</tbody></table></figure>'


def _row(bar: Bar, highest: float) -> str:
    share = min(max(bar.value / highest, 0.0), 1.0) if highest > 0 else 0.0
    return (
        f'<tr title="{escape(bar.hint or bar.label)}"><th scope="row">{escape(bar.name)}</th>'
        f'<td><span class="bar {escape(bar.style)}" style="width:{share:.1%}"></span></td>'
        f"<td>{escape(bar.label)}</td></tr>"
    )
