#!/usr/bin/env python3
"""Writes calibration.json of a caller from its results on labelled windows. Standard library only.

    python3 calibrate.py --start MODEL                        write a calibration that changes nothing, to begin with
    python3 calibrate.py MODEL 300=RESULT 500=RESULT ...      fit the calibration to results of `plimsoll predict`
    python3 calibrate.py --keep MODEL 10000=RESULT ...        the same, and keep the lengths that no result is given for

MODEL is the folder of the caller. RESULT is a folder that `plimsoll predict --caller MODEL --min-length 100` wrote for windows
of the named length, 100 bases or more, whose ids are `label|class|record|...` as make_chunks.py of the genome collection gives
them; families and phyla of these windows must not be in the training data. A length may be given several times: the windows are
pooled.

For each length: slope and intercept of the virus margin by logistic regression (Platt 1999) at equal weight of both labels;
thresholds of the presets at false positive rates of 5 % (default), 20 % (relaxed) and 1 % (conservative), or at the lowest score of
a viral record where that is higher, with the measured rates;
AUROC; expected calibration error in 15 bins (Guo et al. 2017). The temperature of the classes minimizes the cross-entropy.
"""

import argparse
import json
import math
import os
import sys

from files import table
from metrics import auroc, calibration_error
from prepare import CLASSES

PRESETS = {"default": 0.05, "relaxed": 0.20, "conservative": 0.01}
START = {"slope": 1.0, "intercept": 0.0, "auroc": 0.5, "ece": 0.0}


def sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def fit(margins, labels):
    """Slope and intercept of a logistic regression by Newton's method; each label has a total weight of one half."""
    n = [labels.count(0), labels.count(1)]
    weights = [0.5 / n[label] for label in labels]
    slope, intercept = 1.0, 0.0
    for _ in range(100):
        g0 = g1 = h00 = h01 = h11 = 0.0
        for x, label, w in zip(margins, labels, weights):
            p = sigmoid(slope * x + intercept)
            g, h = w * (p - label), w * p * (1 - p)
            g0, g1 = g0 + g, g1 + g * x
            h00, h01, h11 = h00 + h, h01 + h * x, h11 + h * x * x
        # A small ridge keeps the matrix invertible where the labels can be separated.
        h00, h11 = h00 + 1e-9, h11 + 1e-9
        det = h00 * h11 - h01 * h01
        step = ((h11 * g0 - h01 * g1) / det, (h00 * g1 - h01 * g0) / det)
        intercept, slope = intercept - step[0], slope - step[1]
        if abs(step[0]) + abs(step[1]) < 1e-10:
            break
    if slope <= 0:
        sys.exit("the margins do not rise with the label; is this the right model?")
    return slope, intercept


def by_label(scores, labels):
    """The scores of viral records and of others."""
    return [[score for score, label in zip(scores, labels) if label == wanted] for wanted in (1, 0)]


def point(scores, labels, fpr):
    """The threshold above which at most a share `fpr` of the others lies, with the measured rates."""
    viral, others = by_label(scores, labels)
    others.sort(reverse=True)
    # Rounded up, so that the rates are those of the number in the file.
    threshold = math.floor(others[int(fpr * len(others))] * 1e6 + 1) / 1e6
    # Not below every viral record, where a lower threshold finds no more of them: long records are told apart well.
    threshold = min(max(threshold, math.floor(min(viral) * 1e6) / 1e6), 0.999999)
    rate = lambda found: sum(score >= threshold for score in found) / len(found)
    return {"threshold": threshold, "tpr": round(rate(viral), 4), "fpr": round(rate(others), 4)}


def read(folder):
    """Margins, labels, and (logarithms of the class probabilities, true class) of the records of a result."""
    margins, counts = {}, {}
    for row in table(os.path.join(folder, "windows.tsv")):
        name = row["seq_name"]
        if row["margin"] == "NA":
            sys.exit(f"{folder}/windows.tsv: {name} has a window without a score; leave out records of less than 100 bases")
        margins[name] = margins.get(name, 0.0) + float(row["margin"])
        counts[name] = counts.get(name, 0) + 1
    found, labels, classes = [], [], []
    for row in table(os.path.join(folder, "predictions.tsv")):
        name = row["seq_name"]
        label, kind = name.split("|")[:2]
        if name not in margins:
            sys.exit(f"{folder}: {name} is in predictions.tsv and not in windows.tsv; is the result complete?")
        found.append(margins[name] / counts[name])
        labels.append(int(label == "viral"))
        p = {key[2:]: float(value) for key, value in row.items() if key.startswith("p_") and value != "NA"}
        classes.append((p, CLASSES[kind]))
    with open(os.path.join(folder, "run.json")) as file:
        used = json.load(file)["calling"]["calibration"]["class_temperature"]
    return found, labels, [(p, true, used) for p, true in classes]


def temperature(classes):
    """The temperature with the smallest cross-entropy of the true classes, by golden-section search. The probabilities are
    those at the temperature of the result, with four decimals: smaller ones are taken for half a unit of the last."""

    def loss(t):
        total = 0.0
        for p, true, used in classes:
            logits = {name: math.log(max(value, 5e-5)) * used / t for name, value in p.items()}
            top = max(logits.values())
            total -= logits[true] - top - math.log(sum(math.exp(z - top) for z in logits.values()))
        return total

    classes = [row for row in classes if row[1] in row[0]]
    if not classes:
        return 1.0
    low, high, ratio = 0.2, 5.0, (math.sqrt(5) - 1) / 2
    for _ in range(40):
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, b) if loss(a) < loss(b) else (a, high)
    return (low + high) / 2


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("results", nargs="*", metavar="LENGTH=RESULT")
    parser.add_argument("--start", action="store_true")
    parser.add_argument("--keep", action="store_true", help="keep the temperature, and the lengths without a result")
    args = parser.parse_args()
    path = os.path.join(args.model, "calibration.json")
    regions = {"background": 0.65, "background_limit": 2.0, "offset": 1.0, "min_score": 18.0, "min_length": 4000, "merge_gap": 3000, "x_drop": 8.0}
    calibration = {"format": "plimsoll_calibration", "version": 3, "window": 1000, "class_temperature": 1.0, "lengths": []}
    if args.start:
        presets = {name: {"threshold": 0.5, "tpr": 0.5, "fpr": 0.5} for name in PRESETS}
        calibration["lengths"] = [{"length": 500, **START, "presets": presets}]
        calibration["regions"] = regions
    else:
        with open(path) as file:
            before = json.load(file)
        pooled = {}
        for result in args.results:
            length, _, folder = result.partition("=")
            pooled.setdefault(int(length), []).append(read(folder))
        if not pooled:
            parser.error("give results, or --start")
        every = []
        if args.keep:
            calibration["lengths"] = [row for row in before["lengths"] if row["length"] not in pooled]
        for length, parts in sorted(pooled.items()):
            margins, labels, classes = (sum((part[i] for part in parts), []) for i in range(3))
            slope, intercept = fit(margins, labels)
            scores = [sigmoid(slope * x + intercept) for x in margins]
            row = {"length": length, "slope": round(slope, 5), "intercept": round(intercept, 5)}
            row |= {"auroc": round(auroc(*by_label(scores, labels)), 4), "ece": round(calibration_error(scores, labels), 4)}
            row["presets"] = {name: point(scores, labels, fpr) for name, fpr in PRESETS.items()}
            calibration["lengths"].append(row)
            every += classes
            print(json.dumps(row))
        calibration["lengths"].sort(key=lambda row: row["length"])
        kept = before["class_temperature"] if args.keep else None
        calibration["class_temperature"] = kept or round(temperature(every), 4)
        calibration["window"] = before["window"]
        calibration["regions"] = regions | before["regions"]
    with open(path, "w") as file:
        json.dump(calibration, file, indent=2)
        file.write("\n")


main()
