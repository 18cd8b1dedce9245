#!/usr/bin/env bash
# Both sides of the CPU's table on the same cores, by turns in one run, without Rust: prints every measurement as a line of
# JSON, and at the end the table.
#
#   PYTHON=python3 CPUS=0,1 bench/cpu.sh [ROW...]
#
# Rows (all by default): 8M, 35M, 150M, 650M and dnabert in bf16 against the better of PyTorch's bf16 and f32; f32, which is
# 150M in f32 on both sides; gemm, bf16 products against the raw loop; orf and bpe, what one core reads and tokenizes.
# THREADS of both sides, on CPUS (a list as taskset takes it, two physical cores; all that there are without it); ROUNDS of
# both sides; PLIMSOLL and THROUGHPUT, the binaries; COMPILE=1 puts torch.compile around the peers;
# DTYPE=bf16 leaves the peers' f32 out, which takes minutes for 150M and 650M and is the slower one.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
release=${CARGO_TARGET_DIR:-$here/../target}/release
export PLIMSOLL=${PLIMSOLL:-$release/plimsoll}
export THROUGHPUT=${THROUGHPUT:-$release/examples/throughput} # cargo build --release -p plimsoll-data --example throughput
export TOKENIZER=${TOKENIZER:-$here/../fixtures/goldens/dnabert_s/tokenizer.json}
pin=()
[ -z "${CPUS:-}" ] || pin=(taskset -c "$CPUS")
exec "${pin[@]}" "${PYTHON:-python3}" "$here/cpu_table.py" --threads "${THREADS:-2}" --rounds "${ROUNDS:-3}" \
    ${COMPILE:+--compile} ${DTYPE:+--dtype "$DTYPE"} "$@"
