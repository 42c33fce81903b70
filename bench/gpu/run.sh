#!/usr/bin/env bash
# Builds, tests and times the package on a machine with a GPU, within 8 minutes: bench/gpu/run.sh
# Results go to $OUT (default: bench/results/gpu): times.jsonl, a log of each step, and the table, which is printed last.
set -u
cd "$(dirname "$0")/../.."
OUT=${OUT:-bench/results/gpu}
mkdir -p "$OUT"
PYTHON=${PYTHON:-python3}
failed=0

# step NAME SECONDS COMMAND...: runs it with a limit, keeps its output, and goes on whatever comes of it
step() {
    local name=$1 limit=$2 begin=$SECONDS
    shift 2
    timeout "$limit" "$@" >"$OUT/$name.log" 2>&1
    local result=$?
    echo "$name: $([ $result -eq 0 ] && echo passed || echo "failed with $result"), $((SECONDS - begin)) s; $(tail -n 1 "$OUT/$name.log")"
    [ $result -eq 0 ] || failed=1
}

nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm --format=csv,noheader | tee "$OUT/card.txt"
step build 120 "$PYTHON" -m pip install --no-index --no-deps --no-build-isolation -q -e .
step doctor 30 "$PYTHON" -c "import specens_kernels; print(specens_kernels.backends())"
step tests 120 "$PYTHON" -m pytest -q -x tests/ops/test_verify_chain.py tests/ops/test_sample.py \
    tests/ops/test_target_logprobs.py tests/ops/test_uniforms.py tests/ops/test_status.py tests/ops/test_tree_mask.py
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -n 1)
if [ -n "$sanitizer" ]; then
    for tool in memcheck racecheck; do
        step "$tool" 45 "$sanitizer" --tool "$tool" --error-exitcode 9 "$PYTHON" -m bench.gpu.small
    done
else
    echo "memcheck, racecheck: left out, compute-sanitizer is not installed"
fi
step times 200 "$PYTHON" -m bench.gpu.times --json "$OUT/times.jsonl" --budget 170
cat "$OUT/times.log"
exit $failed
