#!/usr/bin/env bash
# Measures both sides of the GPU table on one GPU; needs no Rust. Prints every measurement as a line of JSON, and the table at
# the end.
#
#   PLIMSOLL=plimsoll PYTHON=python3 bench/gpu.sh [SECTION...]
#
# Sections (all by default): esm2, lognormal, dnabert, attention, predict. A section that fails does not end the others.
# MODELS, PACKS and PRECISIONS select from the values below; LIMIT is the maximum number of seconds of one command.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
plimsoll=${PLIMSOLL:-$here/../target/release/plimsoll}
python=${PYTHON:-python3}
models=${MODELS:-3B 650M 150M 35M 8M}
packs=${PACKS:-16384 65536}
precisions=${PRECISIONS:-bf16 fp8}
repeats=${REPEATS:-10}
limit=${LIMIT:-240}
lines=$(mktemp)
trap 'rm -f "$lines"' EXIT

declare -A id=(
    [3B]=facebook/esm2_t36_3B_UR50D [650M]=facebook/esm2_t33_650M_UR50D [150M]=facebook/esm2_t30_150M_UR50D
    [35M]=facebook/esm2_t12_35M_UR50D [8M]=facebook/esm2_t6_8M_UR50D
)

# run COMMAND...: runs a command within the time limit and appends its standard output, lines of JSON, to the results.
run() {
    timeout "$limit" "$@" | tee -a "$lines" || echo "gpu.sh: failed or longer than $limit s: $*" >&2
}

# ours MODEL BATCH PACK: every precision.
ours() {
    local precision
    for precision in $precisions; do
        run "$plimsoll" bench --device cuda:0 --model "$1" --batch "$2" --tokens "$3" --precision "$precision" \
            --repeats "$repeats" --json
    done
}

peers() {
    (cd "$here/peers" && run "$python" "$@")
}

esm2() {
    local model pack
    for model in $models; do
        for pack in $packs; do
            ours "${id[$model]}" "$((pack / 168))x168" "$pack"
        done
    done
    # shellcheck disable=SC2086
    peers esm2.py --model $models --pack $packs --side packed --seconds 2
}

lognormal() {
    local model
    for model in 3B 650M; do
        # Both sides fill packs in order. The peer measures a sample of its packs, Plimsoll all packs of 500 sequences.
        ours "${id[$model]}" 500xlognormal 16384
    done
    peers esm2.py --model 3B 650M --pack 16384 --side packed --lognormal --seconds 2
}

dnabert() {
    local pack
    for pack in $packs; do
        ours zhihan1996/DNABERT-S "$((pack / 105))x105" "$pack"
    done
    # shellcheck disable=SC2086
    peers dnabert_s.py --pack $packs --side sdpa-cudnn --seconds 2
}

attention() {
    peers attention.py --length 168 1024 4096
    [ ! -x "$here/../bin/attention" ] || run "$here/../bin/attention"
}

predict() {
    # shellcheck disable=SC2086
    run "$python" "$here/predict_gpu.py" "$plimsoll" --precision $precisions
}

"$plimsoll" doctor | sed -n '/^gpu/,/^$/p'
for section in ${*:-esm2 lognormal dnabert attention predict}; do
    "$section"
done
"$python" "$here/gpu_summary.py" <"$lines"
