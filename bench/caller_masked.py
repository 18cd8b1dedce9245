#!/usr/bin/env python3
"""How much unknown letters change the scores of a caller. Standard library only.

    python3 GENOMES/make_chunks.py --split test --len 1000 --n 300 --out test_1000.fa
    python3 bench/caller_masked.py make --windows test_1000.fa --out masked.fa
    plimsoll predict masked.fa --max-n 0.5 -o masked
    python3 bench/caller_masked.py score --result masked

`make` writes every window of 1 000 bases several times: cut to 900 and to 750 bases; with 10 % and 25 % of its letters in runs of
12, 20 and 100 N; with 150 N before it; and with a gap of 300 `-` in its middle. Runs begin at random places and do not touch.

`score` prints the mean score of the viral and of the other windows of each kind and the difference from the windows that have as
many known letters: those cut to 750 bases for 25 %, those cut to 900 for the rest. A record without a score counts as 0 if it is
viral and as 1 if not. The last columns say whether a mean of viral windows falls by more than .02, or one of others rises by more
than .03.
"""

import argparse
import os
import random
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../examples/caller"))
from files import fasta, table

RUNS = (12, 20, 100)
SHARES = (10, 25)
LARGEST_FALL, LARGEST_RISE = 0.02, 0.03


def masked(sequence, share, run, drawn):
    """The sequence with about `share` % of its letters in runs of `run` N, with a letter or more between runs."""
    count = round(share * len(sequence) / 100 / run)
    room = len(sequence) - count * run - (count - 1)
    places = sorted(drawn.randrange(room + 1) for _ in range(count))
    letters = list(sequence)
    for number, place in enumerate(places):
        start = place + number * (run + 1)
        letters[start : start + run] = "N" * run
    return "".join(letters)


def variants(sequence, drawn):
    """Pairs of a kind and the sequence changed to it."""
    yield "cut_900", sequence[:900]
    yield "cut_750", sequence[:750]
    for share in SHARES:
        for run in RUNS:
            yield f"masked_{share}_{run}", masked(sequence, share, run, drawn)
    yield "n_before", "N" * 150 + sequence
    middle = len(sequence) // 2
    yield "gap_300", sequence[:middle] + "-" * 300 + sequence[middle:]


def make(args):
    with open(args.out, "w") as out:
        for number, (name, sequence) in enumerate(fasta(args.windows)):
            for kind, changed in variants(sequence, random.Random(number)):
                out.write(f">{kind}|{name}\n{changed}\n")


def score(args):
    scores = {}
    for row in table(os.path.join(args.result, "predictions.tsv")):
        kind, label = row["seq_name"].split("|")[:2]
        is_viral = label == "viral"
        missing = 0.0 if is_viral else 1.0
        value = missing if row["virus_score"] == "NA" else float(row["virus_score"])
        scores.setdefault((kind, is_viral), []).append(value)
    means = {key: sum(values) / len(values) for key, values in scores.items()}
    print(f"{'kind':14} {'viral':>6} {'change':>7}  {'other':>6} {'change':>7}  windows")
    for kind in dict.fromkeys(kind for kind, _ in means):
        against = "cut_750" if kind.startswith("masked_25_") else "cut_900"
        viral, other = (means[kind, is_viral] for is_viral in (True, False))
        fall, rise = viral - means[against, True], other - means[against, False]
        said = [text for text, holds in (("falls", fall < -LARGEST_FALL), ("rises", rise > LARGEST_RISE)) if holds]
        count = len(scores[kind, True]) + len(scores[kind, False])
        print(f"{kind:14} {viral:6.3f} {fall:+7.3f}  {other:6.3f} {rise:+7.3f}  {count:7}  {', '.join(said)}".rstrip())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    maker = commands.add_parser("make")
    maker.add_argument("--windows", required=True)
    maker.add_argument("--out", required=True)
    maker.set_defaults(run=make)
    scorer = commands.add_parser("score")
    scorer.add_argument("--result", required=True)
    scorer.set_defaults(run=score)
    args = parser.parse_args()
    args.run(args)


main()
