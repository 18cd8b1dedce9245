#!/usr/bin/env bash
# Builds Plimsoll for aarch64 Linux and tests it: the tests of the crates down to the kernels, `doctor`, the README's first
# command, and the pipeline against answers of the reference implementations. usage: aarch64.sh [CRATE...]
# On such a machine it needs Rust and python3. On another also Rust's standard library for it (rustup target add
# aarch64-unknown-linux-gnu, or the distribution's own), the cross compiler aarch64-linux-gnu-gcc with its C library, and
# qemu-aarch64, which runs all that is built (Debian: gcc-aarch64-linux-gnu, qemu-user); SYSROOT is where the C library lies
# (/usr/aarch64-linux-gnu). Tests that start a program themselves need a kernel that knows qemu-aarch64 too (Debian:
# qemu-user-binfmt); without one, those of the crates down to the kernels are left out by name, as the last line says.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
target=aarch64-unknown-linux-gnu
binary=$(realpath -m "${CARGO_TARGET_DIR:-target}")/$target/debug/plimsoll
crates=("$@")
[ $# -gt 0 ] || crates=(graph data models plan exec)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Tests that start themselves anew, to have a process alone.
alone=(weights::damage::mutated_files_never_panic train::memory::a_stream_holds_at_most_what_the_ledger_says
    executor::a_step_allocates_nothing)
without=()
emulator=()
if [ "$(uname -m)" != aarch64 ]; then
    for tool in aarch64-linux-gnu-gcc qemu-aarch64; do
        if ! command -v "$tool" >/dev/null; then
            echo "there is no $tool; install gcc-aarch64-linux-gnu and qemu-user" >&2
            exit 1
        fi
    done
    export QEMU_LD_PREFIX=${SYSROOT:-/usr/aarch64-linux-gnu}
    emulator=(qemu-aarch64)
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER=${emulator[*]}
    export CC_aarch64_unknown_linux_gnu=aarch64-linux-gnu-gcc AR_aarch64_unknown_linux_gnu=aarch64-linux-gnu-ar
    # Asked by running a program: a kernel may know the emulator by any name, and in containers nobody can read by which.
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
    echo "aarch64: passed, but without ${without[*]}: the kernel here does not start programs for aarch64 (qemu-user-binfmt)"
else
    echo "aarch64: all passed"
fi
