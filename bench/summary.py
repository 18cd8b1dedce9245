"""Medians of both sides and their ratio, from the JSON lines of compare.sh on standard input.

usage: summary.py TOKENS_PER_PASS < lines
"""

import json
import statistics
import sys


def main():
    tokens = int(sys.argv[1])
    rounds = {"plimsoll": [], "transformers": []}  # one list of seconds per round
    utilisation = []  # of Plimsoll's rounds that have a raw loop to compare with
    for line in sys.stdin:
        measured = json.loads(line)
        rounds[measured["side"]].append(measured["seconds"])
        if measured.get("utilisation") is not None:
            utilisation.append(measured["utilisation"])
    rate = {}
    for side, seconds in rounds.items():
        flat = [s for one in seconds for s in one]
        rate[side] = tokens / statistics.median(flat)
        low, high = tokens / max(flat), tokens / min(flat)
        print(f"{side:<12} {rate[side]:9.0f} tokens/s, median of {len(flat)} ({low:.0f} to {high:.0f})")
    pairs = zip(rounds["plimsoll"], rounds["transformers"], strict=True)
    ratios = sorted(statistics.median(peer) / statistics.median(own) for own, peer in pairs)
    print(f"ratio of medians {rate['plimsoll'] / rate['transformers']:.2f} (rounds {ratios[0]:.2f} to {ratios[-1]:.2f})")
    if utilisation:
        print(f"plimsoll     {100 * statistics.median(utilisation):.1f} % of the raw loop in its own process")


if __name__ == "__main__":
    main()
