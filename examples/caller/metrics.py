#!/usr/bin/env python3
"""Metrics of scores in plain Python: used by calibrate.py and by bench/caller_table.py.

    python3 metrics.py RESULT ...     the mean AUROC of results of `plimsoll predict` on windows of make_chunks.py
"""

import os
import sys

from files import table


def auroc(positive, negative):
    """Probability that a positive has the higher score; ties count one half (Mann and Whitney 1947)."""
    if not positive or not negative:
        return None
    merged = sorted([(score, 1) for score in positive] + [(score, 0) for score in negative])
    rank_sum, i = 0.0, 0
    while i < len(merged):
        end = i
        while end < len(merged) and merged[end][0] == merged[i][0]:
            end += 1
        rank = (i + 1 + end) / 2
        rank_sum += rank * sum(label for _, label in merged[i:end])
        i = end
    n = len(positive)
    return (rank_sum - n * (n + 1) / 2) / (n * len(negative))


def calibration_error(scores, labels, bins=15):
    """Expected calibration error (Guo et al. 2017): mean over windows of |share of viruses - mean score| in their bin."""
    sums = [[0, 0.0, 0] for _ in range(bins)]
    for score, label in zip(scores, labels):
        at = sums[min(int(score * bins), bins - 1)]
        at[0] += 1
        at[1] += score
        at[2] += label
    return sum(abs(score - viral) for n, score, viral in sums if n) / len(scores)


def main():
    found = []
    for result in sys.argv[1:]:
        rows = table(os.path.join(result, "predictions.tsv"))
        missing = [row["seq_name"] for row in rows if row["virus_score"] == "NA"]
        if missing:
            sys.exit(f"{result}: {missing[0]} has no score")
        scores = {label: [float(row["virus_score"]) for row in rows if row["seq_name"].startswith(label + "|")] for label in ("viral", "nonviral")}
        if not scores["viral"] or not scores["nonviral"]:
            sys.exit(f"{result}: the ids of its records are not those of viral and of other windows of make_chunks.py")
        found.append(auroc(scores["viral"], scores["nonviral"]))
    if not found:
        sys.exit("give results of plimsoll predict")
    print(f"{sum(found) / len(found):.4f}")


if __name__ == "__main__":
    main()
