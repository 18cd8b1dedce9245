#!/usr/bin/env python3
"""How well regions of viruses inside host contigs are found. Standard library only.

    python3 bench/caller_regions.py make --genomes GENOMES --fold 0 --out contigs/     contigs.fa and inserts.tsv
    python3 bench/caller_regions.py score --inserts contigs/inserts.tsv --regions result/regions.tsv

`make` joins records of one host species of the fold to contigs of 50 to 500 kb (the collection has pieces of at most 50 kb), puts
one phage of the same fold into the middle third of every second contig, as a whole or cut to 5 to 50 kb, and leaves the others
without. `score` prints the recall of inserts of 10 kb and more (at least half of an insert is covered by regions), the median
distance of a region's borders from those of the insert it covers, and the number of regions that touch no insert for each 10 Mb
of host.
"""

import argparse
import csv
import gzip
import os
import random
import statistics

HOSTS = ("bacteria", "archaea")


def table(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def fasta(path):
    name, parts = None, []
    with gzip.open(path, "rt") as file:
        for line in file:
            if line.startswith(">"):
                if name:
                    yield name, "".join(parts)
                name, parts = line[1:].split()[0], []
            else:
                parts.append(line.strip())
    if name:
        yield name, "".join(parts)


def make(args):
    folds = {row["id"]: int(row["fold"]) for row in table(os.path.join(args.genomes, "folds.tsv"))}
    rows, sequences = {}, {}
    for folder in (args.genomes, os.path.join(args.genomes, "more")):
        if not os.path.exists(os.path.join(folder, "index.tsv")):
            continue
        mine = {row["id"]: row for row in table(os.path.join(folder, "index.tsv")) if folds.get(row["id"]) == args.fold}
        rows |= mine
        for kind in (*HOSTS, "phage"):
            path = os.path.join(folder, "fasta", f"{kind}.fa.gz")
            if os.path.exists(path):
                sequences |= {name: seq for name, seq in fasta(path) if name in mine}
    species = {}
    for name, row in sorted(rows.items()):
        if row["class"] in HOSTS and name in sequences:
            species.setdefault(row["species"], []).append(sequences[name])
    phages = [(name, seq) for name, seq in sorted(sequences.items()) if rows[name]["class"] == "phage"]
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
                phage, seq = drawn.choice(phages)
                length = min(len(seq), int(5_000 * 10 ** drawn.random()))
                begin = drawn.randrange(len(seq) - length + 1)
                place = drawn.randrange(size // 3, 2 * size // 3)
                contig = contig[:place] + seq[begin : begin + length] + contig[place:]
                inserts.write(f"c{number}\t{len(contig)}\t{place + 1}\t{place + length}\t{phage}\n")
            else:
                inserts.write(f"c{number}\t{len(contig)}\tNA\tNA\tNA\n")
            contigs.write(f">c{number} {name}\n{contig}\n")
            number, host = number + 1, host + size
    print(f"{number} contigs, {host / 1e6:.1f} Mb of host")


def score(args):
    found = {}
    for row in table(args.regions):
        found.setdefault(row["seq_name"], []).append((int(row["start"]), int(row["end"])))
    recalled, long, borders, false, host = 0, 0, [], 0, 0
    for row in table(args.inserts):
        regions = found.pop(row["contig"], [])
        if row["start"] == "NA":
            host += int(row["length"])
            false += len(regions)
            continue
        start, end = int(row["start"]), int(row["end"])
        host += int(row["length"]) - (end - start + 1)
        touching = [r for r in regions if r[0] <= end and r[1] >= start]
        false += len(regions) - len(touching)
        covered = sum(min(r[1], end) - max(r[0], start) + 1 for r in touching)
        is_found = 2 * covered >= end - start + 1
        if end - start + 1 >= 10_000:
            long, recalled = long + 1, recalled + is_found
        if is_found:
            borders += [abs(min(r[0] for r in touching) - start), abs(max(r[1] for r in touching) - end)]
    print(f"recall of inserts of 10 kb and more  {recalled} of {long} = {recalled / max(long, 1):.2f}")
    print(f"median border error                  {statistics.median(borders) if borders else 'NA'} bases")
    print(f"false regions                        {false} in {host / 1e6:.1f} Mb = {1e7 * false / host:.2f} in 10 Mb")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    maker = commands.add_parser("make")
    maker.add_argument("--genomes", required=True)
    maker.add_argument("--fold", type=int, required=True)
    maker.add_argument("--out", required=True)
    maker.add_argument("--contigs", type=int, default=400)
    maker.add_argument("--seed", type=int, default=1)
    maker.set_defaults(run=make)
    scorer = commands.add_parser("score")
    scorer.add_argument("--inserts", required=True)
    scorer.add_argument("--regions", required=True)
    scorer.set_defaults(run=score)
    args = parser.parse_args()
    args.run(args)


main()
