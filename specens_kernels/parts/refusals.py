"""What the Triton kernels do not serve yet."""

from __future__ import annotations

from specens_kernels.arguments import RAW_LOGPROBS, Draft, Report, Target
from specens_kernels.types import RuleKind


def refuse(target: Target, draft: Draft | None = None, rule: int = 0, report: Report | None = None) -> None:
    """Raise NotImplementedError with the name of what the triton backend does not serve yet."""
    refused = {
        "rule": rule == RuleKind.SYNTHETIC,
        "processing": target.processing.active,
        "allowed": target.allowed is not None,
        "row_offsets": target.row_offsets is not None,
        "draft_slots": draft is not None and draft.slots is not None,
        "logprobs": report is not None and (report.logprobs == RAW_LOGPROBS or report.top > 0),
    }
    for name, asked in refused.items():
        if asked:
            raise NotImplementedError(f"{name}: the triton backend does not serve it yet")
