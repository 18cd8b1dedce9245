#!/usr/bin/env bash
# Runs the op suite, the goldens and the matmul tests on a GPU under compute-sanitizer: memcheck (addresses) and racecheck
# (shared memory).
#
#   bench/sanitize.sh TEST_EXEC TEST_CUDA      the test binaries of both crates, as gather_gpu.sh gathers them
#
# racecheck also lists hazards inside the kernels of cuBLASLt. Only hazards in kernels of this project count. (Version 2025.3
# of racecheck fails at the first kernel that it is told to skip, so cuBLASLt is not skipped.) LIMIT is the maximum number of
# seconds of one run, SHARDS the number of processes that share the op cases (8), TOOLS the sanitizers to run (both);
# memcheck makes kernels ten to a hundred times slower. Prints a line for each run: its name, the summary of the sanitizer, and
# the result of the tests. Exit code 1 if a run found something, 2 if a run did not finish.
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
logs=$(mktemp -d)
pids=()
# The children run in sessions of their own and do not receive Ctrl-C, so they are killed here.
finish() {
    rm -rf "$logs"
    for pid in "${pids[@]}"; do kill -9 -- -"$pid" 2>/dev/null; done
}
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

# check TOOL BINARY TEST...: one process for each of $shards, side by side.
check() {
    local which=$1 binary=$2 start=$SECONDS shard code summary
    shift 2
    pids=()
    for ((shard = 0; shard < shards; shard++)); do
        # In its own session, so that the whole process group can be killed: if only the tool were killed, the tests would
        # continue on the GPU.
        PLIMSOLL_TEST_SHARD=$shard/$shards setsid timeout -k 2 "$limit" "$tool" --tool "$which" --print-limit 0 \
            --error-exitcode 9 "$binary" --test-threads=1 "$@" >"$logs/$shard" 2>&1 &
        pids+=($!)
    done
    for ((shard = 0; shard < shards; shard++)); do
        wait "${pids[shard]}"
        code=$?
        kill -9 -- -"${pids[shard]}" 2>/dev/null
        log=$logs/$shard
        summary=$(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$log" | tail -1 | sed 's/^=* *//')
        echo "$which $* ($((shard + 1)) of $shards): ${summary:-no summary}; exit $code after $((SECONDS - start)) s;" \
            "$(grep -E '^test result' "$log" | tail -1)"
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
    done
    pids=()
}

for which in ${TOOLS:-memcheck racecheck}; do
    # The smallest tests that cover every form of attention and of norms fused into matmuls: seconds, where the suites
    # take minutes.
    shards=1
    check "$which" "$cuda_tests" few_tokens two_tiles
    check "$which" "$exec_tests" both_models_on_cuda the_caller_on_cuda on_a_gpu
    # The cases of every op in f32 and 16 bits.
    shards=${SHARDS:-8}
    check "$which" "$exec_tests" cuda_runs
    # The tests of the arena launch no kernels and provoke allocation errors, which the sanitizer would report.
    shards=1
    check "$which" "$cuda_tests" --skip every_kernel_compiles --skip same_bits --skip arena::
done
exit "$ended"
