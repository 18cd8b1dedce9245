#!/usr/bin/env python3
"""How well regions of viruses inside host contigs are found. Standard library only.

    python3 bench/caller_regions.py make --genomes GENOMES --split val --out contigs/     contigs.fa and inserts.tsv
    python3 bench/caller_regions.py make --genomes GENOMES --fold 0 --out contigs/        the same of a fold of the training split
    python3 bench/caller_regions.py score --inserts contigs/inserts.tsv --regions result/regions.tsv
    python3 bench/caller_regions.py tune --calibration MODEL/calibration.json contigs/inserts.tsv=result/ ...

`make` joins records of one host species of the split or fold to contigs of 50 to 500 kb (the collection has pieces of at most
50 kb), puts one phage of the same split or fold into the middle third of every second contig, as a whole or cut to 5 to 50 kb, and
leaves the others without. `--hosts` takes other classes of hosts than prokaryotes, `--no-inserts` leaves all contigs without.

With `--pairs BASES` such a contig has two phages with as many bases of host between them.

`score` prints the recall of inserts of 10 kb and more (at least half of an insert is covered by regions), the median distance of a
region's borders from those of the insert it covers, the number of regions that touch no insert for each 10 Mb of host, and the share
of the bases of regions that are inserted (precision) and of inserted bases that are in regions (recall).

`tune` computes the regions of the windows in result/windows.tsv for a grid of parameters, without the model, and prints for each
number of false regions per 10 Mb the parameters with the highest recall of bases, among those with a precision of at least
--precision. It takes all windows for ones that can be called: windows
of low complexity or with unknown letters, which add nothing to a region, are not in windows.tsv.
"""

import argparse
import itertools
import json
import math
import os
import random
import statistics
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../examples/caller"))
from files import fasta, table

HOSTS = ("bacteria", "archaea")


def make(args):
    folds = {}
    if args.fold is not None:
        folds = {row["id"]: int(row["fold"]) for row in table(os.path.join(args.genomes, "folds.tsv"))}

    def is_used(row):
        return row["split"] == args.split if args.fold is None else folds.get(row["id"]) == args.fold

    rows, sequences = {}, {}
    for folder in (args.genomes, os.path.join(args.genomes, "more")):
        if not os.path.exists(os.path.join(folder, "index.tsv")):
            continue
        mine = {row["id"]: row for row in table(os.path.join(folder, "index.tsv")) if is_used(row)}
        rows |= mine
        for kind in (*args.hosts, "phage"):
            path = os.path.join(folder, "fasta", f"{kind}.fa.gz")
            if os.path.exists(path):
                sequences |= {name: seq for name, seq in fasta(path) if name in mine}
    species = {}
    for name, row in sorted(rows.items()):
        if row["class"] in args.hosts and name in sequences:
            species.setdefault(row["species"], []).append(sequences[name])
    phages = [(name, seq) for name, seq in sorted(sequences.items()) if rows[name]["class"] == "phage" and not args.no_inserts]
    drawn = random.Random(args.seed)
    os.makedirs(args.out, exist_ok=True)
    contigs = open(os.path.join(args.out, "contigs.fa"), "w")
    inserts = open(os.path.join(args.out, "inserts.tsv"), "w")
    inserts.write("contig\tlength\tstart\tend\tphage\n")
    number, host = 0, 0
    for name, pieces in sorted(species.items()):
        joined = "".join(pieces)
        at = 0
        while len(joined) - at >= 50_000 and number < args.contigs:
            size = min(int(50_000 * 10 ** drawn.random()), len(joined) - at)
            contig, at = joined[at : at + size], at + size
            if number % 2 == 0 and phages:
                place = drawn.randrange(size // 3, 2 * size // 3)
                places = []
                for _ in range(2 if args.pairs else 1):
                    phage, seq = drawn.choice(phages)
                    length = min(len(seq), int(5_000 * 10 ** drawn.random()))
                    begin = drawn.randrange(len(seq) - length + 1)
                    contig = contig[:place] + seq[begin : begin + length] + contig[place:]
                    places.append((place + 1, place + length, phage))
                    place = min(place + length + (args.pairs or 0), len(contig))
                for start, end, phage in places:
                    inserts.write(f"c{number}\t{len(contig)}\t{start}\t{end}\t{phage}\n")
            else:
                inserts.write(f"c{number}\t{len(contig)}\tNA\tNA\tNA\n")
            contigs.write(f">c{number} {name}\n{contig}\n")
            number, host = number + 1, host + size
    print(f"{number} contigs, {host / 1e6:.1f} Mb of host")


def measure(inserts, found):
    """Counts of `score`; `inserts` are (contig, length, start, end), `found` the regions (start, end) of each contig."""
    keys = ("recalled", "long", "false", "host", "regions", "inserts", "shared", "joined")
    counts = dict.fromkeys(keys, 0) | {"borders": []}
    contigs = {}
    for contig, length, start, end in inserts:
        contigs.setdefault(contig, (length, []))[1].extend([] if start is None else [(start, end)])
    for contig, (length, places) in contigs.items():
        regions = found.get(contig, [])
        counts["regions"] += sum(last - first + 1 for first, last in regions)
        counts["host"] += length - sum(end - start + 1 for start, end in places)
        for first, last in regions:
            touched = sum(first <= end and last >= start for start, end in places)
            counts["false"] += touched == 0
            counts["joined"] += touched > 1
        for start, end in places:
            size = end - start + 1
            touching = [r for r in regions if r[0] <= end and r[1] >= start]
            shared = sum(min(r[1], end) - max(r[0], start) + 1 for r in touching)
            counts["inserts"] += size
            counts["shared"] += shared
            is_found = 2 * shared >= size
            if size >= 10_000:
                counts["long"] += 1
                counts["recalled"] += is_found
            if is_found:
                counts["borders"] += [abs(min(r[0] for r in touching) - start), abs(max(r[1] for r in touching) - end)]
    return counts


def precision(counts):
    """Share of the bases of regions that are inserted; 1 without regions."""
    return counts["shared"] / counts["regions"] if counts["regions"] else 1.0


def recall(counts):
    """Share of the inserted bases that are in regions."""
    return counts["shared"] / max(counts["inserts"], 1)


def read_inserts(path):
    number = lambda text: None if text == "NA" else int(text)
    return [(row["contig"], int(row["length"]), number(row["start"]), number(row["end"])) for row in table(path)]


def score(args):
    found = {}
    for row in table(args.regions):
        found.setdefault(row["seq_name"], []).append((int(row["start"]), int(row["end"])))
    counts = measure(read_inserts(args.inserts), found)
    recalled, long, borders, false, host = (counts[key] for key in ("recalled", "long", "borders", "false", "host"))
    print(f"recall of inserts of 10 kb and more  {recalled} of {long} = {recalled / max(long, 1):.2f}")
    print(f"median border error                  {statistics.median(borders) if borders else 'NA'} bases")
    print(f"false regions                        {false} in {host / 1e6:.1f} Mb = {1e7 * false / host:.2f} in 10 Mb")
    print(f"regions over two inserts             {counts['joined']}")
    print(f"precision and recall of bases        {precision(counts):.2f} and {recall(counts):.2f}")


def segments(scores, x_drop=math.inf):
    """Maximal scoring subsequences (Ruzzo and Tompa 1999) without a drop by more than x_drop, as (first, last, sum before, sum
    after), in order."""
    candidates, total, opened, low, high = [], 0.0, 0, 0.0, 0.0
    for i, value in enumerate(scores):
        before, total = total, total + value
        if total <= low:
            low = high = total
        high = max(high, total)
        if high - total > x_drop:
            opened, low, high = len(candidates), total, total
        if value <= 0:
            continue
        first, left = i, before
        while True:
            j = len(candidates) - 1
            while j >= 0 and candidates[j][2] >= left:
                j = candidates[j][4]
            if j < opened or candidates[j][3] >= total:
                break
            first, left = candidates[j][0], candidates[j][2]
            del candidates[j:]
        candidates.append((first, i, left, total, j))
    return [candidate[:4] for candidate in candidates]


def regions(spans, found, min_score, min_length, merge_gap):
    """The rule of crates/virus/src/methods/caller/regions.rs: weak segments are dropped, near ones merged, short ones dropped."""
    merged = []
    for first, last, left, right in found:
        if right - left < min_score:
            continue
        start, end = spans[first][0], spans[last][1]
        if merged and start - 1 <= merged[-1][1] + merge_gap and right - merged[-1][2] >= min_score:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end), merged[-1][2])
        else:
            merged.append((start, end, left))
    return [(start, end) for start, end, _ in merged if end - start + 1 >= min_length]


def tune(args):
    with open(args.calibration) as file:
        calibration = json.load(file)
    inserts, windows = [], {}
    for number, pair in enumerate(args.results):
        path, _, result = pair.partition("=")
        inserts += [(f"{number}/{row[0]}", *row[1:]) for row in read_inserts(path)]
        for row in table(os.path.join(result, "windows.tsv")):
            windows.setdefault(f"{number}/{row['seq_name']}", []).append(
                (int(row["start"]), int(row["end"]), float(row["margin"]))
            )
    # Contigs are longer than a window, so all windows have the length of the calibration.
    at = next(row for row in calibration["lengths"] if row["length"] == calibration["window"])
    odds, spans = {}, {}
    for name, found in windows.items():
        reached, odds[name], spans[name] = 0, [], []
        for start, end, margin in found:
            # Of a window that overlaps the one before it, only the share of its new bases counts.
            share = (end - max(start - 1, reached)) / (end - start + 1)
            odds[name].append((share, at["slope"] * margin + at["intercept"]))
            spans[name].append((start, end))
            reached = end
    medians = {name: statistics.median(value for _, value in of) for name, of in odds.items()}
    tried = []
    for background, limit, offset, x_drop in itertools.product(
        args.background, args.background_limit, args.offset, args.x_drop
    ):
        level = {name: offset + (background * median if median <= limit else 0) for name, median in medians.items()}
        found = {name: segments([share * (value - level[name]) for share, value in of], x_drop) for name, of in odds.items()}
        for min_score, min_length, merge_gap in itertools.product(args.min_score, args.min_length, args.merge_gap):
            here = {name: regions(spans[name], found[name], min_score, min_length, merge_gap) for name in found}
            counts = measure(inserts, here)
            border = statistics.median(counts["borders"]) if counts["borders"] else math.inf
            tried.append((counts, border, (background, limit, offset, min_score, min_length, merge_gap, x_drop)))
    long, host = tried[0][0]["long"], tried[0][0]["host"]
    print(f"{long} inserts of 10 kb and more, {host / 1e6:.1f} Mb of host")
    print("false in 10 Mb  joined  inserts  precision  recall  border error  background  limit  offset  min_score  min_length  merge_gap     x_drop")
    best = -1
    for counts, border, parameters in sorted(tried, key=lambda row: (row[0]["false"], -recall(row[0]), row[1])):
        if border <= args.border and precision(counts) >= args.precision and recall(counts) > best:
            best = recall(counts)
            print(
                f"{1e7 * counts['false'] / host:14.2f}  {counts['joined']:6}  {counts['recalled']:7}  {precision(counts):9.2f}  {best:6.2f}  {border:12}",
                *(f"{p:9}" for p in parameters),
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    maker = commands.add_parser("make")
    maker.add_argument("--genomes", required=True)
    source = maker.add_mutually_exclusive_group(required=True)
    source.add_argument("--fold", type=int)
    source.add_argument("--split", choices=("val", "test"))
    maker.add_argument("--hosts", type=lambda text: text.split(","), default=HOSTS, help="classes of hosts, by commas")
    maker.add_argument("--no-inserts", action="store_true")
    maker.add_argument("--pairs", type=int, metavar="BASES", help="insert two phages with this number of bases between them")
    maker.add_argument("--out", required=True)
    maker.add_argument("--contigs", type=int, default=400)
    maker.add_argument("--seed", type=int, default=1)
    maker.set_defaults(run=make)
    scorer = commands.add_parser("score")
    scorer.add_argument("--inserts", required=True)
    scorer.add_argument("--regions", required=True)
    scorer.set_defaults(run=score)
    numbers = lambda kind: lambda text: [kind(part) for part in text.split(",")]
    tuner = commands.add_parser("tune")
    tuner.add_argument("--calibration", required=True)
    tuner.add_argument("--border", type=int, default=2000, help="largest median border error")
    tuner.add_argument("--precision", type=float, default=0.9, help="least share of the bases of regions that are inserted")
    tuner.add_argument("--background", type=numbers(float), default=[0.0, 0.5, 0.65, 0.75, 0.85])
    tuner.add_argument("--background-limit", type=numbers(float), default=[1.0, 1.5, 1.75, 2.0])
    tuner.add_argument("--offset", type=numbers(float), default=[k / 10 for k in range(3, 16)])
    tuner.add_argument("--min-score", type=numbers(float), default=[float(k) for k in range(10, 31, 2)])
    tuner.add_argument("--min-length", type=numbers(int), default=[2000, 4000])
    tuner.add_argument("--merge-gap", type=numbers(int), default=[3000])
    tuner.add_argument("--x-drop", type=numbers(float), default=[math.inf, 10.0, 15.0, 20.0, 25.0, 30.0, 40.0])
    tuner.add_argument("results", nargs="+", metavar="INSERTS=RESULT")
    tuner.set_defaults(run=tune)
    args = parser.parse_args()
    args.run(args)


main()
