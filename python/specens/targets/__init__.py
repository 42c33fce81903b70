"""Target distributions beside the ensembles of `specens_kernels`: each position's is computed densely, then verified.

They serve every schedule but `tree`, at the cost of writing one row of logits for each row that is tested.
"""

from specens.targets.cascade import Cascade
from specens.targets.custom import Custom

DenseTarget = Custom | Cascade

__all__ = ["Cascade", "Custom", "DenseTarget"]
