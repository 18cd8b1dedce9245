"""Compares two files prediction_results.txt.

Header, rows, order and labels must be equal; scores may differ by TOL. At the first difference, prints
its line and exits with 1.

usage: compare_scores.py EXPECTED GOT TOL
"""

import sys


def rows(path):
    with open(path, encoding="ascii", newline="") as file:
        return [line.split("\t") for line in file.read().split("\n")]


def difference(expected, got, tol):
    """Returns the first difference as text, or None, and the largest difference of two scores."""
    worst = 0.0
    if len(expected) != len(got):
        return f"{len(got)} lines instead of {len(expected)}", worst
    for number, (want, have) in enumerate(zip(expected, got), start=1):
        if want[:2] != have[:2] or len(want) != len(have) or (number == 1 and want != have):
            return f"line {number}: {have} instead of {want}", worst
        for a, b in zip(want[2:], have[2:]) if number > 1 else ():
            gap = abs(float(a) - float(b))
            worst = max(worst, gap)
            if not gap <= tol:  # NaN is a difference too
                return f"line {number}: {b} instead of {a}, more than {tol} off", worst
    return None, worst


def main():
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    expected, got, tol = sys.argv[1], sys.argv[2], float(sys.argv[3])
    want = rows(expected)
    if len(want) < 3:
        sys.exit(f"{expected}: nothing to compare")
    what, worst = difference(want, rows(got), tol)
    if what:
        sys.exit(f"{got}: {what}")
    print(f"{got}: {len(want) - 2} rows, scores within {worst:.1e} of the goldens")


if __name__ == "__main__":
    main()
