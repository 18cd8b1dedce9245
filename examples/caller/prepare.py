#!/usr/bin/env python3
"""Writes the table of records that `plimsoll train` reads for a caller (the key data.labels). Standard library only.

    python3 prepare.py GENOMES --fold 0 --out fold0.tsv     hold out fold 0: select models by its families and phyla
    python3 prepare.py GENOMES --out all.tsv                train on all training records, validate on the split val

GENOMES is a folder with index.tsv (columns id, class, family_or_phylum, split), folds.tsv (id, fold), fasta/*.fa.gz, and
perhaps more/ of the same form. Records of the split test get no split here: they are neither trained nor validated on.
"""

import argparse
import csv
import os
import sys

# The class of a record in the collection, and the name of the class that the caller gives.
CLASSES = {
    "virus": "eukaryotic_virus",
    "phage": "phage",
    "bacteria": "bacteria",
    "archaea": "archaea",
    "fungi": "fungi",
    "plant": "plant",
    "invertebrate": "animal",
    "vertebrate": "animal",
    "protozoa": "protist",
    "plasmid": "plasmid",
}
VIRAL = ("virus", "phage")


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("genomes")
    parser.add_argument("--fold", type=int, choices=range(5), help="fold of folds.tsv that is held out for validation")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    folds = {row["id"]: int(row["fold"]) for row in rows(os.path.join(args.genomes, "folds.tsv"))}
    records = rows(os.path.join(args.genomes, "index.tsv"))
    more = os.path.join(args.genomes, "more", "index.tsv")
    if os.path.exists(more):
        records += rows(more)
    counts = {}
    with open(args.out, "w") as out:
        out.write("id\tsplit\tvirus\tclass\tkind\tgroup\n")
        for record in records:
            if record["split"] == "train":
                if args.fold is not None and record["id"] not in folds:
                    sys.exit(f"{record['id']} is not in folds.tsv")
                held_out = args.fold is not None and folds[record["id"]] == args.fold
                split = "validation" if held_out else "train"
            else:
                split = "validation" if record["split"] == "val" and args.fold is None else "-"
            kind = record["class"]
            virus = "virus" if kind in VIRAL else "other"
            # Records of no known family form one group for each class.
            group = kind + "/" + (record["family_or_phylum"] or "unknown").replace(" ", "_")
            out.write("\t".join([record["id"], split, virus, CLASSES[kind], kind, group]) + "\n")
            counts[split] = counts.get(split, 0) + 1
    print(", ".join(f"{split} {n}" for split, n in sorted(counts.items())))


if __name__ == "__main__":
    main()
