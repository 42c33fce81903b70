"""Who forwards what when: one file a schedule, and in each a round that reads propose, score, verify, commit."""

from specens.schedules.alternate import Alternate
from specens.schedules.fixed import Fixed
from specens.schedules.parallel import Parallel
from specens.schedules.plan import Plan
from specens.schedules.standard import Standard

SCHEDULES: dict[str, type[Standard] | type[Fixed] | type[Alternate] | type[Parallel]] = {
    "standard": Standard,
    "fixed": Fixed,
    "alternate": Alternate,
    "parallel": Parallel,
}

__all__ = ["SCHEDULES", "Alternate", "Fixed", "Parallel", "Plan", "Standard"]
