#!/usr/bin/env python3
"""How often windows without a virus are called virus. Standard library only.

    python3 bench/caller_negatives.py make --genomes GENOMES --windows test_500.fa --out negatives.fa
    python3 bench/caller_negatives.py score default/ conservative/ ...

`make` writes three kinds of windows of --length bases: dinucleotide-shuffled copies of the non-viral windows of --windows
(make_chunks.py), adjacent windows of all records of val and test that index.tsv calls organelle, mitochondrion or plastid, and
simulated tandem repeats of random units of 1 to 6 bases, in which 5 % of the bases are replaced by another base.

`score` takes results of `plimsoll predict` for negatives.fa or for windows of make_chunks.py, and prints for each result and each
kind of non-viral window how many there are, and the share that is called virus, that has no call because the interval contains the
threshold, and that has no call for another reason.
"""

import argparse
import os
import random
import re
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../examples/caller"))
from files import fasta, table


def shuffled(sequence, drawn):
    """A random sequence with the same counts of dinucleotides, and the same ends (Altschul and Erickson 1985)."""
    last = sequence[-1]
    edges = {}
    for a, b in zip(sequence, sequence[1:]):
        edges.setdefault(a, []).append(b)
    while True:
        # The last edges of all letters but `last` must form a tree to `last`; then every walk uses all edges.
        exits = {a: drawn.choice(to) for a, to in edges.items() if a != last}

        def reaches(letter):
            for _ in exits:
                letter = exits.get(letter, letter)
            return letter == last

        if all(map(reaches, exits)):
            break
    order = {}
    for a, to in edges.items():
        rest = list(to)
        if a in exits:
            rest.remove(exits[a])
        drawn.shuffle(rest)
        order[a] = iter(rest + ([exits[a]] if a in exits else []))
    out = [sequence[0]]
    for _ in range(len(sequence) - 1):
        out.append(next(order[out[-1]]))
    return "".join(out)


def repeat(length, drawn):
    unit = "".join(drawn.choices("ACGT", k=drawn.randint(1, 6)))
    letters = (unit * length)[:length]
    return "".join(drawn.choice([b for b in "ACGT" if b != base]) if drawn.random() < 0.05 else base for base in letters)


def make(args):
    drawn = random.Random(args.seed)
    with open(args.out, "w") as out:
        counts = {}

        def write(kind, name, sequence):
            out.write(f">nonviral|{kind}|{name}|+\n{sequence}\n")
            counts[kind] = counts.get(kind, 0) + 1

        for name, sequence in fasta(args.windows):
            label, kind, record, span = name.split("|")[:4]
            if label == "nonviral" and counts.get("shuffled", 0) < args.n:
                write("shuffled", f"{record}_{kind}|{span}", shuffled(sequence, drawn))
        organelles = {}
        for row in table(os.path.join(args.genomes, "index.tsv")):
            text = " ".join((row["organism"], row["family_or_phylum"], row["note"])).lower()
            if row["split"] in ("val", "test") and re.search("organelle|mitochondri|plastid|chloroplast", text):
                organelles[row["id"]] = row
        for path in sorted({row["class"] for row in organelles.values()}):
            for name, sequence in fasta(os.path.join(args.genomes, "fasta", f"{path}.fa.gz")):
                if name in organelles:
                    row = organelles[name]
                    kind = "mitochondrion" if "mitochondri" in (row["organism"] + row["family_or_phylum"]).lower() else "plastid"
                    for start in range(0, len(sequence) - args.length + 1, args.length):
                        window = sequence[start : start + args.length]
                        if not re.search("[^ACGT]", window):
                            write(f"{kind}_{row['split']}", f"{name}|{start + 1}-{start + args.length}", window)
        for number in range(args.n // 2):
            write("repeat", f"repeat{number}|1-{args.length}", repeat(args.length, drawn))
    print(", ".join(f"{kind} {n}" for kind, n in counts.items()))


def score(args):
    for result in args.results:
        kinds = {}
        for row in table(os.path.join(result, "predictions.tsv")):
            label, kind = row["seq_name"].split("|")[:2]
            if label == "nonviral":
                kinds.setdefault(kind, []).append(row)
        kinds["all"] = [row for rows in kinds.values() for row in rows]
        print(f"{result}\n  kind                 windows  called virus  uncertain  other reason")
        for kind, rows in sorted(kinds.items()):
            virus = sum(row["prediction"] == "virus" for row in rows)
            uncertain = sum(row["reason"] == "uncertain" for row in rows)
            reason = sum(row["prediction"] == "no_call" for row in rows) - uncertain
            n = len(rows)
            print(f"  {kind:20} {n:7}  {virus / n:12.3f}  {uncertain / n:9.3f}  {reason / n:12.3f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    maker = commands.add_parser("make")
    maker.add_argument("--genomes", required=True)
    maker.add_argument("--windows", required=True)
    maker.add_argument("--out", required=True)
    maker.add_argument("--length", type=int, default=500)
    maker.add_argument("--n", type=int, default=2000, help="shuffled windows; half as many repeats")
    maker.add_argument("--seed", type=int, default=1)
    maker.set_defaults(run=make)
    scorer = commands.add_parser("score")
    scorer.add_argument("results", nargs="+")
    scorer.set_defaults(run=score)
    args = parser.parse_args()
    args.run(args)


main()
