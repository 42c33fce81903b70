"""Draws the figures of the concepts: python docs/site/figures.py writes docs/figures/*.svg."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from math import exp, log
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "figures"
INK, GREY, PALE = "#1f2937", "#6b7280", "#e5e7eb"
BLUE, GREEN, RED, AMBER = "#3b82f6", "#10b981", "#ef4444", "#f59e0b"


class Figure:
    """Shapes on a white card."""

    def __init__(self, width: int, height: int, told: str) -> None:
        self.size, self.told, self.parts = (
            (width, height),
            told,
            [f'<rect width="{width}" height="{height}" rx="10" fill="#ffffff"/>'],
        )

    def text(
        self, x: float, y: float, said: str, size: int = 13, fill: str = INK, anchor: str = "middle", bold: bool = False
    ) -> None:
        """Words, by default centred on x."""
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" text-anchor="{anchor}"{weight}>{escape(said)}</text>'
        )

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        said: str = "",
        opacity: float = 1.0,
        ink: str = "#ffffff",
    ) -> None:
        """A rectangle with words in it."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{fill}" fill-opacity="{opacity:g}"/>'
        )
        if said:
            self.text(x + width / 2, y + height / 2 + 4.5, said, fill=ink)

    def line(self, x: float, y: float, to_x: float, to_y: float, stroke: str = GREY, arrow: bool = False) -> None:
        """A line, or an arrow."""
        end = ' marker-end="url(#arrow)"' if arrow else ""
        self.parts.append(
            f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{stroke}" stroke-width="1.5"{end}/>'
        )

    def svg(self) -> str:
        """The file."""
        width, height = self.size
        arrow = f'<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="{GREY}"/></marker></defs>'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" font-family="system-ui, sans-serif" role="img"><title>{escape(self.told)}</title>'
        return "\n".join([head, arrow, *self.parts, "</svg>\n"])


def speculation() -> Figure:
    """A round on a chain of four drafts."""
    figure = Figure(720, 236, "A round: four drafts, two accepted, the third rejected and recovered")
    for x, name in zip((70, 250, 430, 610), ("propose", "score", "verify", "commit")):
        figure.text(x + 20, 30, name, 15, bold=True)
    for x in (140, 320, 500):
        figure.line(x, 25, x + 60, 25, arrow=True)
    words = ["the", "cat", "sat", "on"]
    figure.text(20, 80, "drafter", anchor="start", fill=GREY)
    for index, word in enumerate(words):
        figure.box(110 + 110 * index, 62, 96, 28, AMBER, word)
    figure.text(20, 130, "target", anchor="start", fill=GREY)
    for index in range(5):
        figure.box(110 + 110 * index, 112, 96, 28, BLUE, f"row {index}", 0.85)
        if index < 4:
            figure.line(158 + 110 * index, 92, 158 + 110 * index, 110, arrow=True)
    figure.text(20, 184, "emitted", anchor="start", fill=GREY)
    for index, (word, color) in enumerate([("the", GREEN), ("cat", GREEN), ("slept", RED)]):
        figure.box(110 + 110 * index, 166, 96, 28, color, word)
        figure.line(158 + 110 * index, 142, 158 + 110 * index, 164, arrow=True)
    figure.text(158, 216, "accepted", 12, GREY)
    figure.text(268, 216, "accepted", 12, GREY)
    figure.text(340, 216, "recovered, from the residual", 12, GREY, "start")
    figure.text(543, 184, "never looked at", 12, GREY)
    return figure


def ensembles() -> Figure:
    """Who forwards when, of two members."""
    figure = Figure(720, 266, "Forwards of two members: standard, fixed and alternate")
    schedules = [
        ("standard", [("A", 1), ("B", 1)] * 4, [2, 4, 6, 8]),
        ("fixed, 3 drafts", [("A", 1), ("A", 1), ("A", 1), ("B", 4), ("A", 1), ("A", 1), ("A", 1), ("B", 4)], [4, 8]),
        (
            "alternate",
            [("A", 1), ("B", 2), ("A", 2), ("B", 2), ("A", 2), ("B", 2), ("A", 2), ("B", 2)],
            [2, 3, 4, 5, 6, 7, 8],
        ),
    ]
    for row, (name, forwards, settled) in enumerate(schedules):
        y = 40 + 70 * row
        figure.text(16, y + 20, name, anchor="start", bold=True)
        for index, (member, tokens) in enumerate(forwards):
            figure.box(140 + 70 * index, y, 64, 28, AMBER if member == "A" else BLUE, f"{member}: {tokens}")
        for index in settled:
            figure.text(140 + 70 * index - 38, y + 46, "settled", 11, GREEN)
    figure.text(
        16,
        254,
        "Each box is a forward over that many new tokens. Settled: all members have scored a position, and it is verified.",
        12,
        GREY,
        "start",
    )
    return figure


def rules() -> Figure:
    """Draft and target distributions, their overlap and the residual."""
    figure = Figure(
        720,
        260,
        "The overlap of draft and target distribution is the acceptance; the residual gives the recovered token",
    )
    target, draft = (0.35, 0.30, 0.20, 0.10, 0.05), (0.60, 0.15, 0.05, 0.15, 0.05)
    for index, (own, other) in enumerate(zip(target, draft)):
        x = 60 + 72 * index
        figure.box(x, 200 - 260 * own, 26, 260 * own, BLUE)
        figure.box(x + 28, 200 - 260 * other, 26, 260 * other, AMBER)
        figure.text(x + 27, 220, "abcde"[index], fill=GREY)
    figure.line(50, 200, 420, 200)
    figure.box(60, 236, 14, 14, BLUE)
    figure.text(80, 248, "target", anchor="start")
    figure.box(140, 236, 14, 14, AMBER)
    figure.text(160, 248, "draft", anchor="start")
    overlap = sum(map(min, target, draft))
    figure.text(450, 50, "rule token", 15, anchor="start", bold=True)
    figure.text(450, 76, "a draft x is accepted with probability", anchor="start")
    figure.text(450, 96, "min(1, target(x) / draft(x))", anchor="start", fill=BLUE)
    figure.text(450, 126, f"so {overlap:.2f} of all drafts are: the overlap", anchor="start")
    figure.text(450, 156, "after a rejection: the residual", anchor="start")
    for index, (own, other) in enumerate(zip(target, draft)):
        rest = max(own - other, 0) / (1 - overlap)
        figure.box(452 + 44 * index, 236 - 80 * rest, 30, max(80 * rest, 1), RED if rest else PALE)
        figure.text(467 + 44 * index, 252, "abcde"[index], 12, GREY)
    return figure


def trees() -> Figure:
    """A draft tree and its attention mask."""
    figure = Figure(
        720, 270, "A draft tree, the path that is accepted, and the mask by which one forward scores all nodes"
    )
    parents = (-1, -1, 0, 0, 1, 2)
    indices = [(130, 110), (300, 110), (80, 175), (180, 175), (300, 175), (80, 240)]
    accepted = {0, 2, 5}
    figure.text(215, 50, "committed text", fill=GREY)
    for node, parent in enumerate(parents):
        from_x, from_y = (215, 56) if parent < 0 else indices[parent]
        x, y = indices[node]
        figure.line(from_x, from_y + 8, x, y - 15, GREEN if node in accepted else GREY)
    for node, (x, y) in enumerate(indices):
        figure.box(x - 24, y - 14, 48, 28, GREEN if node in accepted else AMBER, str(node))
    figure.text(560, 40, "who sees whom", 14, bold=True)
    for row in range(6):
        seen, node = set(), row
        while node >= 0:
            seen.add(node)
            node = parents[node]
        figure.text(430, 82 + 30 * row, str(row), 12, GREY)
        figure.box(444, 64 + 30 * row, 60, 26, BLUE, "prefix", 0.35, INK)
        for column in range(6):
            figure.box(508 + 30 * column, 64 + 30 * row, 26, 26, BLUE if column in seen else PALE)
    return figure


def gumbel() -> Figure:
    """Scores of a race, and who wins it."""
    figure = Figure(780, 250, "The token of the largest log probability plus noise wins, whoever drafted it")
    chances, numbers = (0.45, 0.25, 0.15, 0.10, 0.05), (0.20, 0.85, 0.55, 0.35, 0.70)
    scores = [log(chance) - log(-log(number)) for chance, number in zip(chances, numbers)]
    best = scores.index(max(scores))
    low = min(scores) - 0.4
    for index, (chance, score) in enumerate(zip(chances, scores)):
        x, height = 50 + 76 * index, 46 * (score - low)
        figure.box(x, 200 - height, 56, height, GREEN if index == best else BLUE, f"{score:.1f}")
        figure.text(x + 28, 218, "abcde"[index], fill=GREY)
        figure.text(x + 28, 236, f"{chance:.2f}", 12, GREY)
    figure.line(40, 200, 430, 200)
    figure.text(455, 60, "score = log target(v) + G(seed, position, v)", anchor="start", bold=True)
    figure.text(455, 92, "The winner is a draw from the target.", anchor="start")
    figure.text(455, 118, "A draft is accepted where it is the winner,", anchor="start")
    figure.text(455, 138, "else the winner is emitted: the same token", anchor="start")
    figure.text(455, 158, "with any drafter, tree, batch, or none.", anchor="start")
    figure.text(
        455, 190, f"Here: {'abcde'[best]}, of probability {exp(log(chances[best])):.2f}.", anchor="start", fill=GREEN
    )
    return figure


def randomness() -> Figure:
    """Which counter each number comes from."""
    figure = Figure(720, 236, "Numbers of two rounds: their position is that of the round, their step counts from it")
    figure.text(360, 28, "Philox4x32-10: key = seed, counter = (position, step, stream)", 15, bold=True)
    rounds = [
        ("round at position 100, 3 drafts, 1 accepted", 100, 4, 1),
        ("next round at position 102, 3 drafts, all accepted", 102, 4, 3),
    ]
    for row, (name, position, steps, taken) in enumerate(rounds):
        y = 56 + 90 * row
        figure.text(16, y + 8, name, anchor="start", fill=GREY)
        for step in range(steps):
            bonus = step == steps - 1
            own = step <= taken and not (bonus and taken < 3)
            said = f"({position}, {step}, {('next' if bonus else 'accept + next') if step == taken else 'accept'})"
            figure.box(
                20 + 172 * step,
                y + 18,
                160,
                30,
                (GREEN if step < taken else RED) if own else PALE,
                said if own else "not drawn",
                1,
                "#ffffff" if own else GREY,
            )
    figure.text(
        16, 228, "No number is used twice, though both rounds speak about tokens 102 and 103.", 12, GREY, "start"
    )
    return figure


FIGURES: dict[str, Callable[[], Figure]] = {
    made.__name__: made for made in (speculation, ensembles, rules, trees, gumbel, randomness)
}


def main() -> None:
    """Write all."""
    FOLDER.mkdir(exist_ok=True)
    for name, made in FIGURES.items():
        (FOLDER / f"{name}.svg").write_text(made().svg())


if __name__ == "__main__":
    main()
