"""What the Triton kernels do not serve yet."""

from __future__ import annotations

from specens_kernels.arguments import RAW_LOGPROBS, Draft, Report, Target


def refuse(target: Target, draft: Draft | None = None, rule: int = 0, report: Report | None = None) -> None:
    """Raise NotImplementedError with the name of what the triton backend does not serve yet."""
    samplings = [target.sampling] if draft is None else [target.sampling, draft.sampling]
    refused = {
        "top_k": any(s.top_k != 0 or s.top_ks is not None for s in samplings),
        "top_p": any(s.top_p != 1 or s.top_ps is not None for s in samplings),
        "min_p": any(s.min_p != 0 or s.min_ps is not None for s in samplings),
        "rule": rule != 0,
        "processing": target.processing.active,
        "allowed": target.allowed is not None,
        "row_offsets": target.row_offsets is not None,
        "draft_slots": draft is not None and draft.slots is not None,
        "logprobs": report is not None and (report.logprobs == RAW_LOGPROBS or report.top > 0),
    }
    for name, asked in refused.items():
        if asked:
            raise NotImplementedError(f"{name}: the triton backend does not serve it yet")
