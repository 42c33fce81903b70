"""transformers generates with this package: assisted generation is verified by `verify_chain`, ensembles speculate.

Importing this changes nothing in transformers; `enable` does.
"""

from specens.adapters.transformers.assisted import disable, enable
from specens.adapters.transformers.ensemble import speculative_ensemble

__all__ = ["disable", "enable", "speculative_ensemble"]
