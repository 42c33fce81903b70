"""What the bench of pairs needs of llama.cpp: files of other quantisations, and how long `llama_decode` takes."""

from __future__ import annotations

from pathlib import Path

from specens import SpeculativeEnsemble

from bench.end_to_end.llama_cpp import decoding, quantised


def test_a_file_is_quantised_once_and_its_decoding_is_timed(smollm2: Path, tmp_path: Path):
    path = Path(quantised("Q4_0", tmp_path))
    made = path.stat()
    assert Path(quantised("Q4_0", tmp_path)).stat().st_mtime_ns == made.st_mtime_ns
    assert made.st_size < smollm2.stat().st_size
    assert list(tmp_path.iterdir()) == [path]
    pair = SpeculativeEnsemble([f"llama_cpp:{smollm2}", f"llama_cpp:{path}"])
    with decoding() as seconds:
        text = pair.generate([1, 2, 3], max_new_tokens=6, seed=0, stop_tokens=())
    assert len(text.tokens) == 6
    assert len(seconds) >= sum(text.statistics.forwards) > 6
    assert 0 < sum(seconds) < text.statistics.seconds
    pair.generate([1, 2, 3], max_new_tokens=2, seed=0)
    assert len(seconds) == sum(text.statistics.forwards)
