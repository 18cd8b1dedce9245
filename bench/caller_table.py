#!/usr/bin/env python3
"""Tables of how well scores tell viral windows from others. Standard library only.

    python3 bench/caller_table.py --genomes GENOMES --windows test_500.fa --scores result/ --out test_500.json

--windows is a FASTA file of make_chunks.py, whose ids are `label|class|record|start-end|strand`; --scores a table with the
columns seq_name and virus_score (a folder of `plimsoll predict`, or the output of bench/caller_floors.py). Every window must
have a score between 0 and 1, also those that get no call: a missing one is an error.

Prints and writes: AUROC over all windows, over the viral windows whose family is not in training (against all others), for each
group of hosts against all viral windows, for each viral family against all others, the mean over families with an interval
from resampling families (bootstrap, 1000 times, seeded), TPR at FPR 1 and 5 %, and the expected calibration error (15 bins of
equal width).
"""

import argparse
import json
import os
import random
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../examples/caller"))
from files import fasta, table
from metrics import auroc, calibration_error


def tpr_at(positive, negative, fpr):
    """TPR at the lowest threshold that calls at most a share `fpr` of the negatives."""
    allowed = int(fpr * len(negative))
    ordered = sorted(negative, reverse=True)
    threshold = ordered[allowed] if allowed < len(ordered) else -1.0
    return sum(score > threshold for score in positive) / len(positive)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--genomes", required=True)
    parser.add_argument("--windows", required=True)
    parser.add_argument("--scores", required=True)
    parser.add_argument("--out")
    args = parser.parse_args()
    records = {}
    for folder in (args.genomes, os.path.join(args.genomes, "more")):
        path = os.path.join(folder, "index.tsv")
        if os.path.exists(path):
            records |= {row["id"]: row for row in table(path)}
    scores = {}
    path = os.path.join(args.scores, "predictions.tsv") if os.path.isdir(args.scores) else args.scores
    for row in table(path):
        if row["virus_score"] == "NA":
            raise SystemExit(f"{path}: {row['seq_name']} has no score; give predict --min-length 100")
        if row["seq_name"] in scores:
            raise SystemExit(f"{args.scores}: {row['seq_name']} has two rows")
        scores[row["seq_name"]] = float(row["virus_score"])
    viral, other, families, groups, unseen = [], [], {}, {}, []
    for name, _ in fasta(args.windows):
        if name not in scores:
            raise SystemExit(f"{args.scores}: no score of {name}")
        score, (label, kind, record) = scores[name], name.split("|")[:3]
        row = records[record]
        group = row["family_or_phylum"] or "unknown"
        if label == "viral":
            viral.append(score)
            families.setdefault(group, []).append(score)
            if row["family_in_train"] == "no":
                unseen.append(score)
        else:
            other.append(score)
            groups.setdefault(f"{kind}/{group}", []).append(score)
    every = viral + other
    labels = [1] * len(viral) + [0] * len(other)
    of_families = {name: auroc(found, other) for name, found in families.items()}
    resampled = random.Random(1)
    means = []
    for _ in range(1000):
        drawn = resampled.choices(list(of_families.values()), k=len(of_families))
        means.append(sum(drawn) / len(drawn))
    means.sort()
    result = {
        "windows": {"viral": len(viral), "other": len(other), "unseen": len(unseen)},
        "auroc": auroc(viral, other),
        "auroc_unseen_families": auroc(unseen, other),
        "auroc_mean_of_families": sum(of_families.values()) / len(of_families),
        "interval_95_of_the_mean": [means[25], means[974]],
        "tpr_at_fpr_1": tpr_at(viral, other, 0.01),
        "tpr_at_fpr_5": tpr_at(viral, other, 0.05),
        "expected_calibration_error": calibration_error(every, labels),
        "groups_of_hosts": {
            name: {"windows": len(found), "auroc": auroc(viral, found)} for name, found in sorted(groups.items())
        },
        "families": {
            name: {"windows": len(families[name]), "auroc": of_families[name]} for name in sorted(families)
        },
    }
    if args.out:
        with open(args.out, "w") as file:
            json.dump(result, file, indent=1)
            file.write("\n")
    for key in ("auroc", "auroc_unseen_families", "auroc_mean_of_families", "tpr_at_fpr_1", "tpr_at_fpr_5"):
        value = result[key]
        print(f"{key:28} {'-' if value is None else format(value, '.3f')}")
    print(f"{'expected_calibration_error':28} {result['expected_calibration_error']:.3f}")
    weak = [(row["auroc"], name, row["windows"]) for name, row in result["groups_of_hosts"].items()]
    for value, name, count in sorted(weak)[:8]:
        print(f"  {name:34} {count:6} windows {value:.3f}")


main()
