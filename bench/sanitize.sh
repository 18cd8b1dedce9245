#!/usr/bin/env bash
# Runs the op suite, the goldens and the matmul tests on a GPU under compute-sanitizer: memcheck (addresses) and racecheck
# (shared memory).
#
#   bench/sanitize.sh TEST_EXEC TEST_CUDA      the test binaries of both crates, as gather_gpu.sh gathers them
#
# racecheck also lists hazards inside the kernels of cuBLASLt. Only hazards in kernels of this project count. (Version 2025.3
# of racecheck fails at the first kernel that it is told to skip, so cuBLASLt is not skipped.) LIMIT is the maximum number of
# seconds of one run; memcheck makes kernels ten to a hundred times slower. Prints a line for each run: its name, the summary of
# the sanitizer, and the result of the tests. Exit code 1 if a run found something, 2 if a run did not finish.
set -uo pipefail
exec_tests=${1:?the test binary of plimsoll-exec}
cuda_tests=${2:?the test binary of plimsoll-cuda}
kernels=$(cd "$(dirname "${BASH_SOURCE[0]}")/../crates/cuda/src/kernels" && pwd)
limit=${LIMIT:-300}
tool=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | tail -1)
if [ -z "$tool" ]; then
    echo "sanitize.sh: no compute-sanitizer on the path or under /usr/local/cuda" >&2
    exit 2
fi
log=$(mktemp)
running=
# The child runs in its own session and does not receive Ctrl-C, so it is killed here.
finish() { rm -f "$log"; [ -z "$running" ] || kill -9 -- -"$running" 2>/dev/null; }
trap finish EXIT
trap 'exit 130' INT TERM
ended=0
"$tool" --version | tail -1

# Names of the kernels of this project, as a|b|c.
ours=$(cat "$kernels"/*.cu | tr '\n' ' ' | grep -oE '__global__ void (__[a-z_]+__\([^()]*\) *)*[a-z_0-9]+\(' |
    grep -oE '[a-z_0-9]+\($' | tr -d '(' | sort -u | paste -sd '|')
if [ -z "$ours" ]; then
    echo "sanitize.sh: no kernels in crates/cuda/src/kernels beside this script: run it in a checkout" >&2
    exit 2
fi

# check TOOL BINARY TEST...
check() {
    local which=$1 binary=$2 code summary start=$SECONDS
    shift 2
    # In its own session, so that the whole process group can be killed: if only the tool were killed, the tests would
    # continue on the GPU.
    setsid timeout -k 2 "$limit" "$tool" --tool "$which" --print-limit 0 --error-exitcode 9 "$binary" --test-threads=1 "$@" \
        >"$log" 2>&1 &
    running=$!
    wait $running
    code=$?
    kill -9 -- -$running 2>/dev/null
    running=
    summary=$(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$log" | tail -1 | sed 's/^=* *//')
    echo "$which $*: ${summary:-no summary}; exit $code after $((SECONDS - start)) s; $(grep -E '^test result' "$log" | tail -1)"
    if [ "$which $code" = "racecheck 9" ] && grep -q '^test result: ok' "$log" && grep -q ' access at ' "$log" &&
        ! grep ' access at ' "$log" | grep -qE " at ($ours)\+"; then
        echo "    all of them inside of kernels that are not ours"
        code=0
    fi
    case $code in
    0) ;;
    9) ended=1; grep -E '^=========' "$log" | head -40 ;;
    *) [ "$ended" = 1 ] || ended=2; tail -5 "$log" ;;
    esac
}

for which in memcheck racecheck; do
    # The smallest tests that cover every form of attention and of norms fused into matmuls: seconds, where the suites
    # take minutes.
    check "$which" "$cuda_tests" few_tokens two_tiles
    check "$which" "$exec_tests" cuda_runs_every_case cuda_runs_cases both_models_on_cuda
    # The tests of the arena launch no kernels and provoke allocation errors, which the sanitizer would report.
    check "$which" "$cuda_tests" --skip every_kernel_compiles --skip same_bits --skip arena::
done
exit "$ended"
