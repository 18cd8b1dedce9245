#!/usr/bin/env python3
"""Writes the table of records that `plimsoll train` reads for a caller (the key data.labels). Standard library only.

    python3 prepare.py GENOMES --fold 0 --out fold0.tsv     hold out fold 0: select models by its families and phyla
    python3 prepare.py GENOMES --out all.tsv                train on all training records, validate on the split val

GENOMES is a folder with index.tsv (columns id, species, class, family_or_phylum, split), folds.tsv (id, fold), fasta/*.fa.gz, and
perhaps more/ of the same form. Records of the split test get no split here: they are neither trained nor validated on.

The columns for the levels of sampling: `gc` is the share of G and C of the record in bins of 5 %, from 20 to 70 %; records with a lower
share are in the first bin, those with a higher one in the last. `bucket` divides the species of a family or phylum into as many parts as the root of their number, so that families
drawn by bucket have weights by the root of their size, and a family of large genomes has no more weight than one of small ones.
"""

import argparse
import glob
import math
import os
import sys
import zlib

from files import fasta, table

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


def gc_shares(genomes):
    """Share of G and C of every record."""
    shares = {}
    for path in sorted(glob.glob(os.path.join(genomes, "fasta", "*.fa.gz")) + glob.glob(os.path.join(genomes, "more", "fasta", "*.fa.gz"))):
        for name, letters in fasta(path):
            counts = [letters.upper().count(base) for base in "GCAT"]
            shares[name] = sum(counts[:2]) / max(sum(counts), 1)
    return shares


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("genomes")
    parser.add_argument("--fold", type=int, choices=range(5), help="fold of folds.tsv that is held out for validation")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    folds = {row["id"]: int(row["fold"]) for row in table(os.path.join(args.genomes, "folds.tsv"))}
    records = table(os.path.join(args.genomes, "index.tsv"))
    more = os.path.join(args.genomes, "more", "index.tsv")
    if os.path.exists(more):
        records += table(more)
    gc = gc_shares(args.genomes)
    counts, written, species = {}, [], {}
    for record in records:
        if record["split"] == "train":
            if args.fold is not None and record["id"] not in folds:
                sys.exit(f"{record['id']} is not in folds.tsv")
            held_out = args.fold is not None and folds[record["id"]] == args.fold
            split = "validation" if held_out else "train"
        else:
            split = "validation" if record["split"] == "val" and args.fold is None else "-"
        kind = record["class"]
        # Records of no known family form one group for each class.
        group = f"{kind}/{record['family_or_phylum'] or 'unknown'}".replace(" ", "_")
        name = f"{kind}/{record['species'].lower()}".replace(" ", "_")
        if split == "train":
            species.setdefault(group, set()).add(name)
        written.append((record["id"], split, "virus" if kind in VIRAL else "other", CLASSES[kind], kind, group, name))
        counts[split] = counts.get(split, 0) + 1
    with open(args.out, "w") as out:
        out.write("id\tsplit\tvirus\tclass\tkind\tbucket\tspecies\tgc\n")
        for id, split, virus, name, kind, group, of in written:
            parts = max(1, math.ceil(math.sqrt(len(species.get(group, ())))))
            bucket = f"{group}#{zlib.crc32(of.encode()) % parts}"
            if id not in gc:
                sys.exit(f"{id} is in index.tsv and in no FASTA file")
            percent = 5 * max(4, min(14, int(20 * gc[id])))
            out.write("\t".join([id, split, virus, name, kind, bucket, of, f"{percent}%"]) + "\n")
    print(", ".join(f"{split} {n}" for split, n in sorted(counts.items())))


if __name__ == "__main__":
    main()
