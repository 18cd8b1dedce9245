#!/usr/bin/env bash
# Runs both sides of the CPU comparison in alternating rounds, so that load on the machine affects both. Prints every
# measurement as a JSON line, then the ratio of the medians. Options are environment variables; README.md beside this file has
# the set-up and an example.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/.."

python=${PEER_PYTHON:?the python of the peer environment, see bench/README.md}
model=${MODEL:-facebook/esm2_t12_35M_UR50D}
batch=${BATCH:-64}
length=${LENGTH:-168}
threads=${THREADS:-2}
precision=${PRECISION:-f32} # Plimsoll's
dtype=${DTYPE:-f32}         # the peer's
rounds=${ROUNDS:-5}
repeats=${REPEATS:-2} # timed passes of each side in a round, after one warm-up

cargo build --release --quiet
lines=$(mktemp)
trap 'rm -f "$lines"' EXIT

for ((round = 1; round <= rounds; round++)); do
    target/release/plimsoll bench --model "$model" --batch "${batch}x$length" --precision "$precision" \
        --device cpu --threads "$threads" --repeats "$repeats" --json | tee -a "$lines"
    "$python" "$here/cpu_esm2.py" --model "$model" --dtype "$dtype" --batch "$batch" \
        --length "$length" --threads "$threads" --repeats "$repeats" | tee -a "$lines"
done

"$python" "$here/summary.py" "$((batch * length))" <"$lines"
