#!/usr/bin/env bash
# Resident memory of `predict` on two large inputs: one record of 100 Mb, and a million records of 150 bases. The bound is:
# ledger + 150 MB + 2 bytes per base of the longest record + 16 bytes per record.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cargo build --release --quiet
python3 - "$work" <<'PY'
import random, sys
random.seed(1)
block = "".join(random.choice("ACGT") for _ in range(1_000_000))
with open(f"{sys.argv[1]}/long.fa", "w") as f:
    f.write(">one\n")
    for i in range(100):
        at = i * 7919 % len(block)
        turned = block[at:] + block[:at]
        f.writelines(turned[j : j + 80] + "\n" for j in range(0, len(turned), 80))
with open(f"{sys.argv[1]}/reads.fa", "w") as f:
    for i in range(1_000_000):
        at = i * 15485863 % (len(block) - 150)
        f.write(f">read_{i}\n{block[at : at + 150]}\n")
PY
for input in long:100000000:1 reads:150:1000000; do
    IFS=: read -r name longest records <<<"$input"
    target/release/plimsoll predict "$work/$name.fa" -o "$work/$name" --no-progress -q >/dev/null
    python3 - "$work/$name/run.json" "$name" "$longest" "$records" <<'PY'
import json, sys
record, name, longest, records = json.load(open(sys.argv[1])), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
bound = record["plan"]["peak_bytes"] + 150_000_000 + 2 * longest + 16 * records
peak = max(s["peak_bytes"] for s in record["memory"])
print(f"{name}: peak resident {peak:,} B, bound {bound:,} B, {'inside' if peak <= bound else 'OVER'}")
sys.exit(peak > bound)
PY
done
