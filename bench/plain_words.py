#!/usr/bin/env python3
"""Draws doc comments at random for a reading of their words, and counts the words of the main documents.

Both are read from a git revision (`git show REV:path`), so nothing is checked out. The same seed draws the same
comments of a revision on every machine; of two revisions it draws different comments, because their comments differ.

    python3 bench/plain_words.py REV                      # 20 comments of each crate, and the words of the documents
    python3 bench/plain_words.py REV --crate plan -n 5    # 5 comments of one crate
    python3 bench/plain_words.py REV --words              # the words of the documents only

A doc comment is a block of consecutive `///` or `//!` lines of a Rust file in `crates/NAME/src`. It is printed as
`path:line: item`, where the line is that of the comment's first line and the item is the first line of code below it
(`module` for `//!`), followed by the comment's text.

The count of words is that of `wc -w`: runs of characters between white space, tables and code blocks included.
"""

import argparse
import random
import subprocess
import sys

DOCUMENTS = ["README.md", "ARCHITECTURE.md", "BENCHMARKS.md"]


def git(*words):
    """The standard output of a git command; ends the program with git's message if git fails."""
    ran = subprocess.run(["git", *words], capture_output=True)
    if ran.returncode != 0:
        sys.exit(ran.stderr.decode(errors="replace").strip())
    return ran.stdout.decode("utf-8")


def comments(text):
    """The doc comments of a Rust file: (line, item, lines of text) in the order of the file."""
    found = []
    lines = text.split("\n")
    i = 0
    while i < len(lines):
        mark = next((m for m in ("//!", "///") if lines[i].lstrip().startswith(m)), None)
        # `////` and more slashes are ordinary comments.
        if mark is None or lines[i].lstrip().startswith("////"):
            i += 1
            continue
        first = i
        while i < len(lines) and lines[i].lstrip().startswith(mark):
            i += 1
        body = [line.lstrip()[3:].strip() for line in lines[first:i]]
        item = "module"
        if mark == "///":
            # Attributes stand between a comment and its item; one that spans lines ends where its brackets close.
            rest, depth = lines[i:], 0
            item = ""
            for line in rest:
                code = line.strip()
                if depth == 0 and not code.startswith("#[") and code:
                    item = code
                    break
                depth += code.count("[") + code.count("(") - code.count("]") - code.count(")")
        found.append((first + 1, item, body))
    return found


def draw(rev, crate, count, seed):
    """`count` doc comments of a crate, drawn without repetition, in the order of their paths and lines."""
    files = git("ls-tree", "-r", "--name-only", rev, f"crates/{crate}/src").split("\n")
    population = []
    for path in sorted(f for f in files if f.endswith(".rs")):
        for line, item, body in comments(git("show", f"{rev}:{path}")):
            population.append((path, line, item, body))
    # A text as seed: the draw of a crate does not depend on which other crates are drawn.
    drawn = random.Random(f"{seed} {crate}").sample(population, min(count, len(population)))
    return len(population), sorted(drawn)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("rev", help="git revision that is read, for example HEAD")
    parser.add_argument("-n", type=int, default=20, help="doc comments of each crate (default 20)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the draw (default 1)")
    parser.add_argument("--crate", action="append", help="only this crate; may be repeated")
    parser.add_argument("--words", action="store_true", help="count the words of the documents only")
    args = parser.parse_args()
    print(f"revision {git('rev-parse', '--short', args.rev).strip()}, seed {args.seed}")
    for name in DOCUMENTS:
        print(f"  {name:16} {len(git('show', f'{args.rev}:{name}').split()):6} words")
    if args.words:
        return
    every = [f.split("/")[1] for f in git("ls-tree", "--name-only", args.rev, "crates/").split()]
    for crate in args.crate or every:
        total, drawn = draw(args.rev, crate, args.n, args.seed)
        print(f"\n# {crate}: {len(drawn)} of {total} doc comments")
        for path, line, item, body in drawn:
            print(f"\n{path}:{line}: {item}")
            for text in body:
                print(f"    {text}".rstrip())


if __name__ == "__main__":
    main()
