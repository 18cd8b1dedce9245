#!/usr/bin/env bash
# Builds Plimsoll for aarch64 Linux and tests it. usage: aarch64.sh [CRATE...]
#
# It runs the tests of the crates (by default graph, data, models, plan and exec), `doctor`, the README's first command, and
# the pipeline, whose results it compares with those of the reference implementations.
#
# On aarch64 it needs Rust and python3. On another machine it also needs:
# - Rust's standard library for aarch64 (rustup target add aarch64-unknown-linux-gnu, or the distribution's package);
# - the cross compiler aarch64-linux-gnu-gcc with its C library (Debian: gcc-aarch64-linux-gnu);
# - the emulator qemu-aarch64, which runs everything that is built (Debian: qemu-user).
# SYSROOT is the folder of the C library (default /usr/aarch64-linux-gnu).
#
# Some tests start a program themselves. Under emulation this works only if the Linux kernel starts aarch64 programs with
# qemu-aarch64 (Debian: qemu-user-binfmt). If it does not, these tests are skipped, and the last line of output names them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
target=aarch64-unknown-linux-gnu
binary=$(realpath -m "${CARGO_TARGET_DIR:-target}")/$target/debug/plimsoll
crates=("$@")
[ $# -gt 0 ] || crates=(graph data models plan exec)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Tests that start their own program again, because they need a process of their own.
alone=(weights::damage::mutated_files_never_panic train::memory::a_stream_holds_at_most_what_the_ledger_says
    executor::a_step_allocates_nothing)
without=()
emulator=()
if [ "$(uname -m)" != aarch64 ]; then
    for tool in aarch64-linux-gnu-gcc qemu-aarch64; do
        if ! command -v "$tool" >/dev/null; then
            echo "$tool was not found; install gcc-aarch64-linux-gnu and qemu-user" >&2
            exit 1
        fi
    done
    export QEMU_LD_PREFIX=${SYSROOT:-/usr/aarch64-linux-gnu}
    emulator=(qemu-aarch64)
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER=${emulator[*]}
    export CC_aarch64_unknown_linux_gnu=aarch64-linux-gnu-gcc AR_aarch64_unknown_linux_gnu=aarch64-linux-gnu-ar
    # Find out by running a program whether the Linux kernel starts aarch64 programs: the emulator may be registered under any
    # name, and a container cannot read the list of registered emulators.
    echo 'int main(void) { return 0; }' | aarch64-linux-gnu-gcc -x c - -o "$work/program"
    "$work/program" 2>/dev/null || without=("${alone[@]}")
fi

cargo test --locked --target "$target" "${crates[@]/#/--package=plimsoll-}" -- --exact "${without[@]/#/--skip=}"
cargo build --locked --target "$target" --package plimsoll-cli
"${emulator[@]}" "$binary" doctor
"${emulator[@]}" "$binary" predict examples/reads.fa --no-progress -o "$work/first"
for length in 300 500; do
    expected=fixtures/goldens/pipeline/expected_$length got=$work/golden_$length
    "${emulator[@]}" "$binary" predict fixtures/goldens/pipeline/reads.fa --weights fixtures/goldens \
        --length "$length" --keep-intermediate --no-progress -o "$got"
    for file in chunked.fa nucleotide.fa protein.faa prediction_results_highestscore.csv; do
        cmp "$expected/$file" "$got/$file"
    done
    python3 .ci/compare_scores.py "$expected/prediction_results.txt" "$got/prediction_results.txt" 1e-5
done
if [ ${#without[@]} -gt 0 ]; then
    echo "aarch64: passed, without ${without[*]}: the Linux kernel of this machine does not start aarch64 programs (install qemu-user-binfmt)"
else
    echo "aarch64: all passed"
fi
