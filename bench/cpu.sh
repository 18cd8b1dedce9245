#!/usr/bin/env bash
# Measures both sides of the CPU table, alternating on equal cores in one run; needs no Rust. Prints every measurement as a line
# of JSON, and the table at the end.
#
#   PYTHON=python3 CPUS=0,1 bench/cpu.sh [ROW...]
#
# Rows (all by default): 8M, 35M, 150M, 650M and dnabert in bf16 against the faster of PyTorch's bf16 and f32; f32: 150M in f32
# on both sides; gemm: bf16 matmuls against the raw loop; orf and bpe: finding open reading frames and tokenizing on one core.
# Variables: THREADS of each side; CPUS, a list of cores for taskset (two physical cores; without it all cores are used); ROUNDS
# of each side; PLIMSOLL and THROUGHPUT, the binaries; COMPILE=1 applies torch.compile to the peers; DTYPE=bf16 omits f32 of the
# peers, which is slower than bf16 and takes minutes for 150M and 650M.
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
