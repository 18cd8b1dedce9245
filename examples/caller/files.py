"""Readers of tab-separated tables and of FASTA files: used by the scripts here and by bench/caller_*.py."""

import csv
import gzip


def table(path):
    """The rows of a table with a header line, as dictionaries."""
    with open(path, newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def fasta(path):
    """Pairs of id and sequence, in order."""
    opened = gzip.open if path.endswith(".gz") else open
    name, parts = None, []
    with opened(path, "rt") as file:
        for line in file:
            if line.startswith(">"):
                if name is not None:
                    yield name, "".join(parts)
                name, parts = line[1:].split()[0], []
            else:
                parts.append(line.strip())
    if name is not None:
        yield name, "".join(parts)
