"""A picture of what speculation gains: speed-up against draft length, and against the weight of the first member."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specens.planner import Candidate, Measured, Prediction, candidates, predict_all

INCHES = (10.0, 4.2)


def load_pyplot() -> Any:
    """The module matplotlib.pyplot, drawing into files; raises ImportError saying what to install."""
    try:
        import matplotlib
    except ImportError:
        raise ImportError("--plot: expected matplotlib; install it, or specens-kernels with the extra plot") from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def plot_speedups(
    path: Path, predictions: Sequence[Prediction], by_weight: Mapping[float, Measured], names: Sequence[str]
) -> None:
    """Write a PNG. by_weight: what was measured under other weights of the first of two members; may be empty."""
    pyplot = load_pyplot()
    figure, panels = pyplot.subplots(1, 2 if by_weight else 1, figsize=INCHES, squeeze=False, sharey=True)
    _draw_lines(panels[0][0], speedups_by_length(predictions, names), "draft length")
    if by_weight:
        longest = max(max(prediction.candidate.draft_lens) for prediction in predictions)
        lines = speedups_by_weight(by_weight, longest, names)
        _draw_lines(panels[0][1], lines, f"weight of {names[0]}, each with its best draft length")
    panels[0][0].set_ylabel("speed-up over standard, predicted")
    figure.tight_layout()
    figure.savefig(path, format="png", dpi=150)
    pyplot.close(figure)


def speedups_by_length(predictions: Sequence[Prediction], names: Sequence[str]) -> dict[str, dict[float, float]]:
    """Of each kind of schedule its speed-up at every draft length, the same for all members."""
    lines: dict[str, dict[float, float]] = {}
    for prediction in predictions:
        candidate = prediction.candidate
        if candidate.schedule != "standard" and len(set(candidate.draft_lens)) == 1:
            lines.setdefault(_kind(candidate, names), {})[candidate.draft_lens[0]] = prediction.speedup
    return lines


def speedups_by_weight(
    by_weight: Mapping[float, Measured], longest: int, names: Sequence[str]
) -> dict[str, dict[float, float]]:
    """Of each kind of schedule the speed-up of its best draft lengths at every weight."""
    lines: dict[str, dict[float, float]] = {}
    for weight, measured in by_weight.items():
        for prediction in predict_all(measured, list(candidates(measured.num_members, longest))):
            if prediction.candidate.schedule != "standard":
                line = lines.setdefault(_kind(prediction.candidate, names), {})
                line[weight] = max(line.get(weight, 0.0), prediction.speedup)
    return lines


def _kind(candidate: Candidate, names: Sequence[str]) -> str:
    if candidate.schedule != "alternate":
        return f"fixed, {names[candidate.reads_alone or 0]} drafts"
    return "alternate" if candidate.drafter is None else f"alternate, {names[candidate.drafter]} begins"


def _draw_lines(panel: Any, lines: Mapping[str, Mapping[float, float]], title: str) -> None:
    for name in sorted(lines):
        places = sorted(lines[name])
        panel.plot(places, [lines[name][place] for place in places], "o-", label=name)
    panel.axhline(1.0, color="grey", linewidth=0.8)
    panel.set_xlabel(title)
    panel.grid(alpha=0.3)
    panel.legend()
