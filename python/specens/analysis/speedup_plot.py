"""A picture of what speculation gains: speed-up against draft length, and against the weight of the first member."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specens.analysis.model_names import short_names
from specens.analysis.planner import Candidate, Measured, Prediction, candidates, predict_all
from specens.files.json_lines import check_index
from specens_kernels import Sampling

if TYPE_CHECKING:
    from specens.generate import SpeculativeEnsemble

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


def check_picture(path: Path) -> None:
    """Raise ValueError where no picture can be written at a path, and ImportError as `load_pyplot`."""
    kinds = sorted(load_pyplot().figure().canvas.get_supported_filetypes())
    load_pyplot().close()
    if path.suffix.lower().removeprefix(".") not in kinds:
        raise ValueError(f"--plot: expected a name that ends in one of .{', .'.join(kinds)}; got {path}")
    check_index("--plot", path)


def picture_title(models: Sequence[str], sampling: Sampling, ensemble: SpeculativeEnsemble) -> str:
    """Of what the predictions are: the models, how is sampled, and in which type they compute."""
    filters = {name: getattr(sampling, name) for name in ("top_k", "top_p", "min_p")}
    said = [f"temperature {sampling.temperature:g}", *(f"{name} {value:g}" for name, value in filters.items() if value)]
    dtype = str(getattr(ensemble.models[0], "dtype", "")).removeprefix("torch.")
    return f"{' and '.join(short_names(models))}\n{', '.join([*said, dtype])}"


def plot_speedups(
    path: Path,
    predictions: Sequence[Prediction],
    by_weight: Mapping[float, Measured],
    names: Sequence[str],
    title: str = "",
) -> None:
    """Write a picture of the kind that the path's suffix says.

    by_weight: what was measured under other weights of the first of two members; may be empty.
    """
    pyplot = load_pyplot()
    figure, panels = pyplot.subplots(1, 2 if by_weight else 1, figsize=INCHES, squeeze=False, sharey=True)
    figure.suptitle(title, fontsize="medium", wrap=True)
    _draw_lines(panels[0][0], speedups_by_length(predictions, names), "draft length")
    panels[0][0].xaxis.get_major_locator().set_params(integer=True)
    if by_weight:
        longest = max(max(prediction.candidate.draft_lens) for prediction in predictions)
        lines = speedups_by_weight(by_weight, longest, names)
        _draw_lines(panels[0][1], lines, f"weight of {names[0]}, each with its best draft length")
    panels[0][0].set_ylabel("speed-up over standard, predicted")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
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
    """Of each kind of schedule the speed-up of its best draft length, the same for all members, at every weight."""
    lines: dict[str, dict[float, float]] = {}
    for weight, measured in by_weight.items():
        even = [each for each in candidates(measured.num_members, longest) if len(set(each.draft_lens)) == 1]
        for prediction in predict_all(measured, even):
            if prediction.candidate.schedule != "standard":
                line = lines.setdefault(_kind(prediction.candidate, names), {})
                line[weight] = max(line.get(weight, 0.0), prediction.speedup)
    return lines


def _kind(candidate: Candidate, names: Sequence[str]) -> str:
    own = candidate.drafter if isinstance(candidate.drafter, str) else names[candidate.drafter or 0]
    if candidate.schedule != "alternate":
        return f"{candidate.schedule}, {own} drafts"
    return "alternate" if candidate.drafter is None else f"alternate, {own} begins"


def _draw_lines(panel: Any, lines: Mapping[str, Mapping[float, float]], title: str) -> None:
    for name in sorted(lines):
        indices = sorted(lines[name])
        panel.plot(indices, [lines[name][index] for index in indices], "o-", label=name)
    panel.axhline(1.0, color="grey", linewidth=0.8)
    panel.set_xlabel(title)
    panel.grid(alpha=0.3)
    panel.legend()
