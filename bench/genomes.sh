#!/usr/bin/env bash
# Runs `predict` with the built-in models on all labelled genomes (../shared/genomes, 85 Mb) and prints counts, time and
# memory. Not a test: prints a message and stops if the genomes are absent.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
genomes=${GENOMES:-../shared/genomes/fasta}
if [ ! -d "$genomes" ]; then
    echo "no genomes at $genomes; set GENOMES to a folder of .fa.gz files" >&2
    exit 0
fi
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
cargo build --release --quiet
target/release/plimsoll predict "$genomes"/*.fa.gz -o "$out/all" --no-progress "$@"
python3 - "$out/all/run.json" <<'PY'
import json, sys
r = json.load(open(sys.argv[1]))
for key in ("counts", "tokens", "seconds", "tokens_per_second", "packing_fill"):
    print(key, json.dumps(r[key]))
print("planned", r["plan"]["peak_bytes"], "peak resident", max(s["peak_bytes"] for s in r["memory"]))
PY
