"""Writes docs/models.md: python -m zoo.table > docs/models.md, with tests/ on the path (make models)."""

import contextlib
import sys
import warnings

import transformers

from zoo.outcomes import EQUAL, outcomes
from zoo.overrides import NOT_BUILT
from zoo.tiny import MODEL_TYPES, tiny_model

HEAD = """# Models

Written by `make models` with transformers {version}: a tiny random model of each causal LM architecture that it knows,
and for each schedule whether the greedy text is the one that `model.generate` writes. "fixed", "alternate" and "tree"
draft with a slightly changed copy; "batch" is `generate_many` on three prompts of different lengths. Models that do not
take the masks of batches or trees are read one request, or one path, a forward; some are read anew after a rejection.

| architecture | standard | fixed | alternate | batch | tree |
|---|---|---|---|---|---|"""
SCHEDULES = ("standard", "fixed", "alternate", "batch", "tree")


def line(model_type: str) -> tuple[str, str]:
    """The row of an architecture, and the reason where it is not all equal."""
    try:
        model = tiny_model(model_type)
    except Exception as error:  # noqa: BLE001, whatever a configuration fails with
        known = f"{NOT_BUILT[model_type]}: " if model_type in NOT_BUILT else ""
        row = f"| {model_type} |" + " not built |" * len(SCHEDULES)
        return row, f"not built here: {known}{_short(error)}"
    found = outcomes(model)
    cells = " | ".join(found[name].split(":")[0] for name in SCHEDULES)
    reasons = sorted({outcome for outcome in found.values() if outcome != EQUAL})
    return f"| {model_type} | {cells} |", "; ".join(_short(reason) for reason in reasons)


def _short(reason: object) -> str:
    text = str(reason).strip()
    return text.splitlines()[0][:200].replace("|", "/") if text else type(reason).__name__


def main() -> None:
    """Print the page."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    print(HEAD.format(version=transformers.__version__))
    reasons = []
    for model_type in MODEL_TYPES:
        with contextlib.redirect_stdout(sys.stderr):  # some models print
            row, reason = line(model_type)
        print(row, flush=True)
        reasons += [f"- `{model_type}`: {reason}"] if reason else []
    print("\n## Reasons\n\n" + "\n".join(reasons))


if __name__ == "__main__":
    main()
