#!/usr/bin/env bash
# compute-sanitizer over the op suite, the goldens and the products on a GPU: memcheck (addresses) and racecheck (shared memory).
#
#   bench/sanitize.sh TEST_EXEC TEST_CUDA      the test binaries of both crates, as gather_gpu.sh gathers them
#
# racecheck also lists hazards inside of cuBLASLt's kernels: only hazards in kernels of this project count. (It is not told to leave out cuBLASLt: version
# 2025.3 then fails at the first kernel that it leaves out.) LIMIT is the most seconds of one run (memcheck slows kernels ten to a
# hundred times). Ends with a line for each: what was run, the sanitizer's summary, and
# how the tests ended; 1 where any found something, 2 where any was not run to its end.
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
# A session of its own does not hear of Ctrl-C.
finish() { rm -f "$log"; [ -z "$running" ] || kill -9 -- -"$running" 2>/dev/null; }
trap finish EXIT
trap 'exit 130' INT TERM
ended=0
"$tool" --version | tail -1

# The entries of our files: a|b|c.
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
    # In a session of its own, which is ended whole: what only loses its tool goes on, on the card.
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
    # The arena's tests launch nothing: they read what is free, and are refused on purpose.
    check "$which" "$cuda_tests" --skip every_kernel_compiles --skip same_bits --skip arena::
done
exit "$ended"
