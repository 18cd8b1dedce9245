"""Writes BENCHMARKS.md from bench/results/*.json.

    python3 bench/tables.py            # writes BENCHMARKS.md
    python3 bench/tables.py --check    # exit code 1 if BENCHMARKS.md differs from what would be written

Files of one `machine` form a section, each file one table. The fields are described in bench/README.md. Prints a warning
for each row whose `ratio` is not the quotient of its two figures within their rounding. Standard library only.
"""

import json
import re
import sys
import textwrap
from decimal import Decimal
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEAD = """# Benchmarks

`bench/tables.py` writes this file from `bench/results/*.json`; edit the JSON files. Both sides of a row alternate on
one set of cores or one GPU in one run, with random weights that have the shapes of the real models. Figures are
medians; a list has one figure for each run; ratios of single turns follow a ratio in parentheses. A ratio above 1 means
that Plimsoll is faster; ratios of bytes are Plimsoll's bytes divided by the peer's. The share of the limit is relative
to the rate that the device reaches in a bare loop or matmul, measured alternately with the work. A target is a rate
that was to be reached; the table says if it was missed. "Recorded" is the date of the commit that added the figures.
Set-up of the peers: [bench/README.md](bench/README.md). Explanations and failed experiments:
[docs/decisions](docs/decisions/README.md).
"""
COLUMNS = ["work", "peer", "peer's figure", "ours", "unit", "ratio", "share of the limit", "target", "note"]
# Units of time. Their ratio is the peer's figure divided by ours, so that a ratio above 1 always means faster.
TIMES = {"s", "ms", "us"}


def shown(value):
    """A figure with its digits in groups of three; a list of figures with commas; text as it is."""
    if value is None:
        return ""
    if isinstance(value, list):
        return ", ".join(map(shown, value))
    return str(value) if isinstance(value, str) else f"{value:,}".replace(",", " ")


def warn_about_ratio(file, row):
    """Compares `ratio` with the quotient of the figures, all of them taken as rounded to their last digit."""
    figures = [row.get(key) for key in ("ours", "peer", "ratio")]
    if not all(isinstance(figure, int | Decimal) for figure in figures):
        return
    ours, peer, ratio = map(Decimal, figures)
    above, below = (peer, ours) if row["unit"] in TIMES else (ours, peer)
    half = lambda figure: Decimal(1).scaleb(figure.as_tuple().exponent) / 2
    low = (above - half(above)) / (below + half(below)) - half(ratio)
    high = (above + half(above)) / (below - half(below)) + half(ratio)
    if not low <= ratio <= high:
        print(f"{file.name}: {row['work']}: ratio {ratio}, quotient {above / below:.3f}", file=sys.stderr)


def cells(row):
    ratio = shown(row.get("ratio"))
    if row.get("turns"):
        ratio += f" ({row['turns']})"
    given = {"peer": "peer_version", "peer's figure": "peer", "share of the limit": "share_of_limit"}
    line = {name: shown(row.get(given.get(name, name))) for name in COLUMNS}
    return line | {"ratio": ratio}


def wrapped(text, first="", rest=""):
    """The text in lines of at most 120 characters. Short code, numbers with spaces and `a + b` stay on one line."""
    glued = re.sub(r"`[^`]{1,80}`|\d(?: \d{3})+\b| \+ ", lambda found: found[0].replace(" ", "\0"), text)
    lines = textwrap.fill(
        glued, 120, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
    return lines.replace("\0", " ")


def table(topic):
    rows = [cells(row) for row in topic["rows"]]
    names = [name for name in COLUMNS if any(row[name] for row in rows)]
    units = {row["unit"] for row in rows}
    heads = list(names)
    if len(units) == 1 and "unit" in names:
        # If all rows have one unit, the header shows it.
        names.remove("unit")
        unit = units.pop()
        heads = [f"{name}, {unit}" if name == "ours" else name for name in names]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(names) + "|"]
    lines += ["| " + " | ".join(row[name] for name in names) + " |" for row in rows]
    software = ", ".join(f"{name} {version}" for name, version in topic["software"].items())
    facts = [f"`{topic['command']}`"] if topic.get("command") else []
    facts += [software] if software else []
    facts += [f"recorded {topic['date']}"] if topic.get("date") else []
    below = [wrapped(fact, "- ", "  ") for fact in ["; ".join(facts), *topic.get("limits", [])] if fact]
    return "\n".join([f"### {topic['topic']}", *lines, "", *below]) + "\n"


def document():
    machines = {}
    for file in sorted((ROOT / "bench/results").glob("*.json")):
        topic = json.loads(file.read_text(), parse_float=Decimal)
        for row in topic["rows"]:
            warn_about_ratio(file, row)
        machines.setdefault(topic["machine"], []).append(topic)
    parts = [HEAD]
    for machine, topics in machines.items():
        hardware = dict.fromkeys(topic["hardware"] for topic in topics)
        parts.append(f"## {machine}\n" + "\n".join(map(wrapped, hardware)) + "\n")
        parts += map(table, topics)
    return "\n".join(parts)


def main():
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit(__doc__)
    path, text = ROOT / "BENCHMARKS.md", document()
    if not sys.argv[1:]:
        path.write_text(text)
    elif path.read_text() != text:
        sys.exit("BENCHMARKS.md is not what bench/results/*.json say: run `python3 bench/tables.py`")


main()
