#!/usr/bin/env bash
# Builds Plimsoll for aarch64 Linux and tests it: the tests of the crates down to the kernels, `doctor`, the README's first
# command, and the pipeline against answers of the reference implementations. usage: aarch64.sh [CRATE...]
# On such a machine it needs Rust and python3. On another also Rust's standard library for it (rustup target add
# aarch64-unknown-linux-gnu, or the distribution's own), the cross compiler aarch64-linux-gnu-gcc with its C library, and
# qemu-aarch64, which runs all that is built, known to the kernel too, since one test starts itself anew (Debian:
# gcc-aarch64-linux-gnu, qemu-user, qemu-user-binfmt); SYSROOT is where the C library lies (/usr/aarch64-linux-gnu).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
target=aarch64-unknown-linux-gnu
binary=$(realpath -m "${CARGO_TARGET_DIR:-target}")/$target/debug/plimsoll
crates=("$@")
[ $# -gt 0 ] || crates=(graph data models plan exec)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

emulator=()
if [ "$(uname -m)" != aarch64 ]; then
    for tool in aarch64-linux-gnu-gcc qemu-aarch64; do
        if ! command -v "$tool" >/dev/null; then
            echo "there is no $tool; install gcc-aarch64-linux-gnu and qemu-user" >&2
            exit 1
        fi
    done
    if [ ! -e /proc/sys/fs/binfmt_misc/qemu-aarch64 ]; then
        echo "the kernel does not know qemu-aarch64, by which a test starts itself anew; install qemu-user-binfmt" >&2
        exit 1
    fi
    export QEMU_LD_PREFIX=${SYSROOT:-/usr/aarch64-linux-gnu}
    emulator=(qemu-aarch64)
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER=${emulator[*]}
    export CC_aarch64_unknown_linux_gnu=aarch64-linux-gnu-gcc AR_aarch64_unknown_linux_gnu=aarch64-linux-gnu-ar
fi

cargo test --locked --target "$target" "${crates[@]/#/--package=plimsoll-}"
cargo build --locked --target "$target" --package plimsoll
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
echo "aarch64: all passed"
