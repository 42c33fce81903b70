"""Bar charts as SVG elements, coloured by the style sheet of the page that they stand in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 420, 180
BAR_HEIGHT, LABEL_WIDTH = 22, 130
FOOT, HEAD = 22, 18


@dataclass(frozen=True)
class Bar:
    """A value with its name, what is written at it, a longer text that is shown when it is pointed at, and a class."""

    name: str
    value: float
    label: str
    hint: str = ""
    style: str = "bar"


def columns(bars: Sequence[Bar], highest: float, title: str) -> str:
    """Upright bars side by side; `highest` is the value that reaches the top."""
    step = WIDTH / max(len(bars), 1)
    room = HEIGHT - FOOT - HEAD
    parts = [f'<line class="axis" x1="0" x2="{WIDTH}" y1="{HEIGHT - FOOT}" y2="{HEIGHT - FOOT}"/>']
    for place, bar in enumerate(bars):
        tall = room * _share(bar.value, highest)
        left, top = place * step, HEIGHT - FOOT - tall
        middle = left + step / 2
        width = min(step * 0.7, 60)
        parts.append(_rectangle(bar, middle - width / 2, top, width, tall))
        parts.append(_text(middle, top - 4, "middle", bar.label))
        parts.append(_text(middle, HEIGHT - 6, "middle", bar.name))
    return _frame(parts, HEIGHT, title)


def lines(bars: Sequence[Bar], title: str) -> str:
    """Lying bars below each other, the longest as long as there is room."""
    highest = max((bar.value for bar in bars), default=0.0)
    room = WIDTH - LABEL_WIDTH - 90
    parts = []
    for place, bar in enumerate(bars):
        top = place * BAR_HEIGHT + 4
        long = room * _share(bar.value, highest)
        parts.append(_text(LABEL_WIDTH - 8, top + 13, "end", bar.name))
        parts.append(_rectangle(bar, LABEL_WIDTH, top, long, BAR_HEIGHT - 6))
        parts.append(_text(LABEL_WIDTH + long + 6, top + 13, "start", bar.label))
    return _frame(parts, len(bars) * BAR_HEIGHT + 8, title)


def _share(value: float, highest: float) -> float:
    return min(max(value / highest, 0.0), 1.0) if highest > 0 else 0.0


def _rectangle(bar: Bar, left: float, top: float, width: float, height: float) -> str:
    place = f'x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect class="{escape(bar.style)}" {place} rx="2"><title>{escape(bar.hint or bar.label)}</title></rect>'


def _text(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _frame(parts: Sequence[str], height: int, title: str) -> str:
    box = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    inside = "".join(parts)
    return f'<figure><figcaption>{escape(title)}</figcaption><svg {box} role="img">{inside}</svg></figure>'
