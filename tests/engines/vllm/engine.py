"""An engine of vLLM in a process of its own: a job comes in as JSON, texts go out to the file that it names.

job: model and speculative (a folder, a speculative configuration or null), engine (further settings), batches (lists of
requests, each with prompt, params and how often it is repeated), out. A result: for each batch the tokens of its
requests with what was reported of them, and how many drafts were made and accepted.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
    import interpreted_kernels  # noqa: F401

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams


def params_of(settings: dict[str, Any]) -> SamplingParams:
    """Sampling parameters; a regular expression as `regex`."""
    settings = dict(settings)
    if regex := settings.pop("regex", None):
        settings["structured_outputs"] = StructuredOutputsParams(regex=regex)
    if bias := settings.pop("logit_bias", None):
        settings["logit_bias"] = {int(token): value for token, value in bias.items()}
    return SamplingParams(**settings)


def report_of(logprobs: Any) -> list[list[tuple[int, float, int]]] | None:
    """Token, log-probability and rank of what was reported at each position; nothing at a prompt's first one."""
    if logprobs is None:
        return None
    return [[(token, entry.logprob, entry.rank) for token, entry in (step or {}).items()] for step in logprobs]


def generate(engine: LLM, batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The completions of a batch, in order."""
    requests = [request for request in batch for _ in range(request.get("repeat", 1))]
    prompts = [{"prompt_token_ids": request["prompt"]} for request in requests]
    outputs = engine.generate(prompts, [params_of(request["params"]) for request in requests], use_tqdm=False)
    return [
        {
            "tokens": list(output.outputs[0].token_ids),
            "report": report_of(output.outputs[0].logprobs),
            "prompt_report": report_of(output.prompt_logprobs),
        }
        for output in outputs
    ]


def counted(engine: LLM) -> dict[str, int]:
    """Drafts, accepted drafts, preemptions and cached tokens since the engine started."""
    names = {"vllm:spec_decode_num_draft_tokens": "drafts", "vllm:spec_decode_num_accepted_tokens": "accepted"}
    names |= {"vllm:num_preemptions": "preemptions", "vllm:prefix_cache_hits": "cached"}
    return {names[metric.name]: int(metric.value) for metric in engine.get_metrics() if metric.name in names}


def main() -> None:
    """Run the job."""
    job = json.load(sys.stdin)
    settings = {"max_model_len": 256, "max_num_seqs": 128, "enforce_eager": True, "dtype": "float32", "seed": 0}
    settings |= {"disable_log_stats": False, "enable_prefix_caching": False, **job["engine"]}
    engine = LLM(job["model"], speculative_config=job["speculative"], **settings)
    texts = [generate(engine, batch) for batch in job["batches"]]
    Path(job["out"]).write_text(json.dumps({"batches": texts, **counted(engine)}))


if __name__ == "__main__":
    main()
