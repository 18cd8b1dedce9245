#!/usr/bin/env python3
"""Floors for the built-in caller: simple classifiers on the windows that the caller is measured on.

    python3 bench/caller_floors.py --fit fit_500.fa --windows test_500.fa --out floors/   (needs numpy and scikit-learn)

Both FASTA files come from make_chunks.py (ids `label|class|record|start-end|strand`). Writes one table seq_name, virus_score for
each floor, which bench/caller_table.py reads: `orfs` (logistic regression on lengths of stop-free runs), `kmers` (logistic
regression on canonical 6-mers), `codons` (logistic regression on codons and dipeptides of the longest stop-free runs), `trees`
(gradient-boosted trees on 4-mers, codons and stop-free runs).
"""

import argparse
import os
import sys

import numpy as np
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../examples/caller"))
from files import fasta

STOPS = {"TAA", "TAG", "TGA"}
CODONS = [a + b + c for a in "ACGT" for b in "ACGT" for c in "ACGT"]
AMINO = dict(zip(CODONS, "KNKNTTTTRSRSIIMIQHQHPPPPRRRRLLLLEDEDAAAAGGGGVVVV*Y*YSSSS*CWCLFLF"))
RESIDUES = "ACDEFGHIKLMNPQRSTVWY"
PAIRS = str.maketrans("ACGT", "TGCA")


def canonical(k):
    """Index of every k-mer's lexicographically smaller strand."""
    found, index = {}, {}
    for number in range(4**k):
        word = "".join("ACGT"[number >> (2 * (k - 1 - i)) & 3] for i in range(k))
        back = word.translate(PAIRS)[::-1]
        index[word] = found.setdefault(min(word, back), len(found))
    return index, len(found)


def kmers(sequence, index, size, k):
    counts = np.zeros(size, np.float32)
    for i in range(len(sequence) - k + 1):
        at = index.get(sequence[i : i + k])
        if at is not None:
            counts[at] += 1
    return counts / max(counts.sum(), 1)


def frames(sequence):
    """Codons of the six frames."""
    for strand in (sequence, sequence.translate(PAIRS)[::-1]):
        for frame in range(3):
            yield [strand[i : i + 3] for i in range(frame, len(strand) - 2, 3)]


def runs(sequence):
    """Stop-free runs of all frames as lists of codons, the longest first."""
    found = []
    for codons in frames(sequence):
        run = []
        for codon in codons:
            if codon in STOPS:
                found.append(run)
                run = []
            else:
                run.append(codon)
        found.append(run)
    return sorted(found, key=len, reverse=True)


def orfs(sequence):
    lengths = [len(run) for run in runs(sequence)][:6]
    lengths += [0] * (6 - len(lengths))
    stops = [sum(codon in STOPS for codon in codons) for codons in frames(sequence)]
    gc = sum(base in "GC" for base in sequence) / len(sequence)
    return np.array([3 * n / len(sequence) for n in lengths] + sorted(stops) + [gc], np.float32)


def codons(sequence):
    longest = [codon for run in runs(sequence)[:2] for codon in run]
    uses = np.zeros(64, np.float32)
    pairs = np.zeros(400, np.float32)
    at = {codon: i for i, codon in enumerate(CODONS)}
    residue = {letter: i for i, letter in enumerate(RESIDUES)}
    for codon in longest:
        if codon in at:
            uses[at[codon]] += 1
    protein = [residue.get(AMINO.get(codon, "X")) for codon in longest]
    for a, b in zip(protein, protein[1:]):
        if a is not None and b is not None:
            pairs[a * 20 + b] += 1
    return np.concatenate([uses / max(uses.sum(), 1), pairs / max(pairs.sum(), 1)])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", required=True)
    parser.add_argument("--windows", required=True)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    os.makedirs(args.out, exist_ok=True)
    six, four = canonical(6), canonical(4)
    logistic = lambda: make_pipeline(StandardScaler(), LogisticRegression(max_iter=300, C=0.1))
    floors = {
        "orfs": (orfs, logistic),
        "kmers": (lambda s: kmers(s, *six, 6), logistic),
        "codons": (codons, logistic),
        "trees": (
            lambda s: np.concatenate([kmers(s, *four, 4), codons(s)[:64], orfs(s)]),
            lambda: HistGradientBoostingClassifier(max_iter=400, learning_rate=0.08, random_state=1),
        ),
    }
    (fit_names, fit), (names, windows) = (zip(*fasta(path)) for path in (args.fit, args.windows))
    labels = np.array([name.startswith("viral|") for name in fit_names])
    for floor, (features, model) in floors.items():
        fitted = model().fit(np.stack([features(s) for s in fit]), labels)
        scores = fitted.predict_proba(np.stack([features(s) for s in windows]))[:, 1]
        with open(os.path.join(args.out, f"{floor}.tsv"), "w") as file:
            file.write("seq_name\tvirus_score\n")
            file.writelines(f"{name}\t{score:.6f}\n" for name, score in zip(names, scores))
        print(floor, "done", flush=True)


main()
