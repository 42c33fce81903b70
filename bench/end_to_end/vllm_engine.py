"""Times one engine of vLLM, in a process of its own: the job comes in as JSON, a JSON line goes out for each run.

A job has the rows to measure, each with setting, batch and length. To a row are added tokens and seconds, drafts and
accepted ones, a checksum of each text, and the job's facts.
"""

from __future__ import annotations

import json
import sys
import time
import zlib
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams

from bench.end_to_end.rows import append

COUNTS = {"vllm:spec_decode_num_draft_tokens": "drafts", "vllm:spec_decode_num_accepted_tokens": "accepted"}


def counted(engine: LLM) -> dict[str, int]:
    """Drafts and accepted drafts since the engine started; none without speculation."""
    found = {COUNTS[metric.name]: int(metric.value) for metric in engine.get_metrics() if metric.name in COUNTS}
    return {"drafts": 0, "accepted": 0} | found


def timed(engine: LLM, prompts: list[str], settings: dict[str, Any], length: int) -> dict[str, Any]:
    """One run of a batch, every request to its full length."""
    params = [SamplingParams(max_tokens=length, ignore_eos=True, detokenize=False, **settings) for _ in prompts]
    messages, before = [[{"role": "user", "content": prompt}] for prompt in prompts], counted(engine)
    start = time.perf_counter()
    outputs = engine.chat(messages, params, use_tqdm=False)
    seconds, after = time.perf_counter() - start, counted(engine)
    texts = [list(output.outputs[0].token_ids) for output in outputs]
    new = {name: after[name] - before[name] for name in after}
    return {"tokens": sum(map(len, texts)), "seconds": seconds, **new, "texts": [checksum(text) for text in texts]}


def checksum(text: list[int]) -> int:
    """By which a row tells a text."""
    return zlib.crc32(json.dumps(text).encode())


def main() -> None:
    """Run the job, a warm-up first."""
    job = json.load(sys.stdin)
    settings = {"dtype": "bfloat16", "max_model_len": 1024, "max_num_seqs": 8, "seed": 0, "disable_log_stats": False}
    settings |= {"enforce_eager": True, "enable_prefix_caching": False}
    engine = LLM(job["model"], speculative_config=job["speculative"], **settings)
    timed(engine, job["prompts"], {"temperature": 0.0}, 8)
    for row in job["rows"]:
        prompts = (job["prompts"] * row["batch"])[: row["batch"]]
        run = timed(engine, prompts, job["settings"][row["setting"]], row["length"])
        append(Path(job["out"]), row | run | job["facts"])


if __name__ == "__main__":
    main()
