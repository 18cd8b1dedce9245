"""The table of gpu.sh: for each model, size of a step and lengths, the fastest PyTorch and Plimsoll's precisions with their
ratios to it.

usage: gpu_summary.py < lines of JSON
"""

import json
import re
import sys
from collections import defaultdict


def shape(row):
    """(model, tokens of a step to the next power of two, lengths)"""
    if row.get("side") != "plimsoll":
        lengths = 105 if row["lengths"] == "95 to 115" else row["lengths"]
        return row["model"], row["pack"], lengths
    size = re.search(r"_(\d+[MB])_", row["model"])
    pack = 1 << (row["step_tokens"] - 1).bit_length()
    return size[1] if size else row["model"].split("/")[-1], pack, row["length"]


def main():
    ours, theirs = defaultdict(dict), defaultdict(dict)
    attention = []
    for line in sys.stdin:
        if not line.startswith("{"):
            continue
        row = json.loads(line)
        if "failed" in row and isinstance(row["failed"], str):
            print("failed:", line.strip(), file=sys.stderr)
        elif "microseconds" in row:
            attention.append(row)
        elif "orfs_per_s" in row:
            print(f"predict, {row['protein']}, {row['precision']}: {row['orfs_per_s']} ORF/s ({row['orfs_per_s_with_load']} with load)")
        elif row.get("side") == "plimsoll":
            ours[shape(row)][row["dtype"]] = row
        elif "tokens_per_s" in row:
            theirs[shape(row)][row["side"]] = row
    print("\n| model | tokens of a step | lengths | PyTorch | Plimsoll | ratio | of the product's rate |\n|---|---|---|---|---|---|---|")
    for key in sorted(set(ours) | set(theirs), key=str):
        side, best = max(theirs[key].items(), key=lambda item: item[1]["tokens_per_s"], default=("not run", None))
        for dtype, row in ours[key].items() or [("not run", None)]:
            peer = f"{best['tokens_per_s']:,} ({side})" if best else side
            rate = f"{row['tokens_per_s']:,.0f} ({dtype})" if row else dtype
            ratio = f"{row['tokens_per_s'] / best['tokens_per_s']:.2f}" if row and best else ""
            share = f"{100 * row['utilisation']:.0f} %" if row and row.get("utilisation") else ""
            print("| " + " | ".join([key[0], str(key[1]), str(key[2]), peer, rate, ratio, share]) + " |")
    if attention:
        print("\n| attention | length | microseconds | TFLOP/s |\n|---|---|---|---|")
        for row in sorted(attention, key=lambda row: (row["length"], row["microseconds"])):
            print(f"| {row['side']}, {row['layout']} | {row['length']} | {row['microseconds']} | {row['tflops']} |")


main()
