#!/usr/bin/env bash
# Builds, checks and times the package on a machine with a GPU and without a network.
#   bench/gpu/run.sh          all of it, within 6 minutes
#   bench/gpu/run.sh quick    a few times, within 90 seconds, for tuning
# Results go to $OUT (default: bench/results/gpu), rows as they come, a log of each step; the table is printed last.
# STUB=1 runs the script without a GPU (tests/gpu_stub): nothing is built, and there are no numbers.
set -u
cd "$(dirname "$0")/../.."
MODE=${1:-full}
OUT=${OUT:-bench/results/gpu}
PYTHON=${PYTHON:-python3}
STUB=${STUB:-}
JOBS=${JOBS:-$(nproc)}
case $MODE in
    full) SECONDS_IN_ALL=${SECONDS_IN_ALL:-350} QUICK="" ;;
    quick) SECONDS_IN_ALL=${SECONDS_IN_ALL:-85} QUICK=--quick ;;
    *) echo "expected full or quick, got $MODE" >&2; exit 2 ;;
esac
mkdir -p "$OUT"
rm -f "$OUT"/*.log "$OUT"/*.jsonl
failed=0

# module NAME ...: runs one, on the GPU or the stub
module() {
    if [ -n "$STUB" ]; then
        PYTHONPATH="tests${PYTHONPATH:+:$PYTHONPATH}" "$PYTHON" -m gpu_stub.run "$@"
    else
        "$PYTHON" -m "$@"
    fi
}

# step NAME SECONDS COMMAND...: runs it with a limit, keeps its output, and goes on whatever comes of it
step() {
    local name=$1 limit=$2 begin=$SECONDS result
    shift 2
    [ -z "$STUB" ] || limit=$((limit * 5)) # limits are for machines with a GPU
    timeout "$limit" "$@" >"$OUT/$name.log" 2>&1
    result=$?
    echo "$name: $([ $result -eq 0 ] && echo passed || echo "failed with $result"), $((SECONDS - begin)) s; $(tail -n 1 "$OUT/$name.log")"
    [ $result -eq 0 ] || failed=1
    return $result
}

# Triton must serve the GPU's calls, or everything below would measure something else
assert_triton='
import torch, specens_kernels
from specens_kernels.backend import READY
assert torch.cuda.is_available(), "torch sees no GPU"
taken = READY.get(("verify_chain", None, "cuda"), ("nothing",))[0]
print(specens_kernels.backends())
assert taken == "triton", f"verify_chain is served by {taken}: " + str(specens_kernels.backends()["triton"].reason)'

compile_part() { module bench.gpu.compile_first --part "$1" $QUICK ${STUB:+--dry}; }

# in processes of one core each; a part that fails leaves the others
compile_all() {
    local part pids=() result=0
    for ((part = 0; part < JOBS; part++)); do
        OMP_NUM_THREADS=1 compile_part "$part/$JOBS" &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do wait "$pid" || result=1; done
    return $result
}
export -f module compile_part compile_all
export PYTHON STUB QUICK JOBS

if [ -z "$STUB" ]; then
    nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm --format=csv,noheader | tee "$OUT/card.txt"
    step build 120 "$PYTHON" -m pip install --no-index --no-deps --no-build-isolation -q -e .
    step triton 30 "$PYTHON" -c "$assert_triton" || { cat "$OUT/triton.log"; exit 1; }
fi
step compile 100 bash -c compile_all
# in processes of one thread each: the reference that they compare with takes most of their time
check_all() {
    local part pids=() result=0
    for ((part = 0; part < CHECKERS; part++)); do
        module bench.gpu.checks --json "$OUT/checks.jsonl" --part "$part/$CHECKERS" ${STUB:+--launch-only} &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do wait "$pid" || result=1; done
    return $result
}
export -f check_all
export OUT CHECKERS=$((JOBS < 4 ? JOBS : 4))

# What is not timed runs side by side: the checks, and what they launch under the sanitizer's tools, of which racecheck
# takes three times as long as memcheck. So it sees each launch once, as memcheck sees it again when it is replayed.
if [ "$MODE" = full ]; then
    export OMP_NUM_THREADS=1
    sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -n 1)
    pids=()
    for tool in memcheck racecheck; do
        launches="bench.gpu.checks --launch-only --calls $([ $tool = memcheck ] && echo 3 || echo 1) --budget 80"
        if [ -n "$STUB" ]; then
            step "$tool" 95 bash -c "module $launches" & pids+=($!)
        elif [ -n "$sanitizer" ]; then
            step "$tool" 95 "$sanitizer" --tool "$tool" --error-exitcode 9 "$PYTHON" -m $launches & pids+=($!)
        else
            echo "$tool: left out, compute-sanitizer is not installed"
        fi
    done
    step checks 95 bash -c check_all
    grep FAILED "$OUT/checks.log"
    for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
    unset OMP_NUM_THREADS
fi
step kernels 40 "$PYTHON" -m bench.gpu.kernels --json "$OUT/kernels.jsonl" ${STUB:+--dry} && grep -v "^USDT" "$OUT/kernels.log"
# Last the calls of the quick run once more, by programmatic dependent launches, which are off unless asked for.
left=$((SECONDS_IN_ALL - SECONDS - $([ "$MODE" = full ] && echo 35 || echo 0)))
step times $((left > 20 ? left : 20)) "$PYTHON" -m bench.gpu.times --json "$OUT/times.jsonl" \
    --budget $((left > 30 ? left - 15 : 15)) $QUICK ${STUB:+--dry}
cat "$OUT/times.log"
if [ "$MODE" = full ]; then
    step dependent 40 "$PYTHON" -m bench.gpu.times --quick --dependent --json "$OUT/dependent.jsonl" --budget 20 ${STUB:+--dry}
    cat "$OUT/dependent.log"
fi
exit $failed
