"""Measures the rows of the CPU table: Plimsoll and PyTorch alternate in one run; prints medians and ratios. cpu.sh runs it and lists the rows.

The peer models stay loaded, so that a turn consists of forward passes only. After a turn of a peer the script waits until the
threads of the peer sleep.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time

ESM2 = {
    "8M": ("facebook/esm2_t6_8M_UR50D", 64, 168),
    "35M": ("facebook/esm2_t12_35M_UR50D", 64, 168),
    "150M": ("facebook/esm2_t30_150M_UR50D", 64, 168),
    "650M": ("facebook/esm2_t33_650M_UR50D", 16, 512),
    "f32": ("facebook/esm2_t30_150M_UR50D", 64, 168),
}
DNABERT = ("zhihan1996/DNABERT-S", 64, 105)
# Required and desired ratio of each row.
BARS = {"8M": (8, 20), "35M": (8, 20), "150M": (8, 15), "650M": (5, 10), "dnabert": (8, 15), "f32": (3, 4)}
# (N, K) of the matmuls of a layer: fused q, k and v, output of attention, and the two of the MLP.
GEMM = {d: [(3 * d, d), (d, d), (4 * d, d), (d, 4 * d)] for d in (640, 1280)}
ROWS = [*BARS, "gemm", "orf", "bpe"]
# Seconds to wait after a turn of a peer, because by default OpenMP's threads spin for some time after their last work.
ASLEEP = 0.3


def say(**line):
    print(json.dumps(line), flush=True)


def plimsoll(threads, precision, *what, repeats):
    """Runs `plimsoll bench` and returns its JSON object."""
    command = [os.environ["PLIMSOLL"], "bench", "--device", "cpu", "--threads", str(threads), "--precision", precision]
    done = subprocess.run([*command, *what, "--repeats", str(repeats), "--json"], check=True, capture_output=True, text=True)
    line = json.loads(done.stdout)
    print(done.stdout.strip(), flush=True)
    return line


class Peer:
    """The PyTorch model of a row in one dtype, after a warm-up."""

    def __init__(self, row, dtype, args):
        import torch

        torch.manual_seed(0)
        torch.set_num_threads(args.threads)
        self.dtype, self.batch, self.length = dtype, *shape(row)[1:]
        if row == "dnabert":
            import cpu_dnabert_s as peer

            model, bias = peer.build(dtype, self.length, args.compile)
            ids = torch.randint(5, peer.VOCABULARY, (self.batch, self.length))
            self.passes = lambda n, some=None: peer.measure(model, bias, ids[:some], 0, n)
        else:
            import cpu_esm2 as peer

            encoder = peer.build(shape(row)[0], dtype)
            encoder = torch.compile(encoder) if args.compile else encoder
            ids = peer.tokens(self.batch, self.length)
            self.passes = lambda n, some=None: peer.measure(encoder, ids[:some], 0, n)
        # A full batch of the largest model would take minutes; an eighth of it warms up threads and weights as well.
        self.passes(1, max(1, self.batch // 8) if row == "650M" and not args.compile else None)

    def turn(self, row, args):
        seconds = self.passes(args.repeats)
        rate = self.batch * self.length / statistics.median(seconds)
        side = "torch.compile" if args.compile else "torch"
        say(side=side, row=row, dtype=self.dtype, tokens_per_s=round(rate, 1), seconds=seconds)
        time.sleep(ASLEEP)
        return seconds


def shape(row):
    return DNABERT if row == "dnabert" else ESM2[row]


def models(row, args):
    """Runs the rounds of both sides and returns a line of the table."""
    precision = "f32" if row == "f32" else "bf16"
    peers = [Peer(row, dtype, args) for dtype in (["f32"] if row == "f32" else args.dtype or ["bf16", "f32"])]
    model, batch, length = shape(row)
    work = ["--model", model, "--batch", f"{batch}x{length}"]
    mine, shares, theirs = [], [], [[] for _ in peers]
    for _ in range(args.rounds):
        line = plimsoll(args.threads, precision, *work, repeats=args.repeats)
        mine.append(line["seconds"])
        shares.append(line["utilisation"])
        for peer, rounds in zip(peers, theirs):
            rounds.append(peer.turn(row, args))
    best, rounds = min(zip(peers, theirs), key=lambda side: middle(side[1]))
    ratios = sorted(statistics.median(b) / statistics.median(a) for a, b in zip(mine, rounds))
    rate = lambda rounds: f"{batch * length / middle(rounds):,.0f}"
    others = ", ".join(f"{p.dtype} {rate(r)}" for p, r in zip(peers, theirs) if p is not best)
    return {
        "work": f"{model.split('/')[-1]}, {batch} x {length}, {precision}",
        "Plimsoll": f"{rate(mine)} tokens/s, {100 * statistics.median(shares):.0f} % of the raw loop",
        "PyTorch": f"{best.dtype} {rate(rounds)}" + (f" ({others})" if others else ""),
        "ratio": f"{middle(rounds) / middle(mine):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
        "bar": "{}, aim {}".format(*BARS[row]),
    }


def middle(rounds):
    """The median of all passes of all rounds."""
    return statistics.median(s for one in rounds for s in one)


def gemm(args):
    """Matmuls of 2 048 rows: share of the raw loop for each, and for all matmuls of a layer together."""
    for d, shapes in GEMM.items():
        lines = [plimsoll(args.threads, "bf16", "--shape", f"2048x{n}x{k}", repeats=5 * args.rounds) for n, k in shapes]
        shares = [f"{n}x{k} {100 * line['utilisation']:.0f} %" for (n, k), line in zip(shapes, lines)]
        seconds = sum(statistics.median(line["seconds"]) for line in lines)
        raw = sum(line["flops"] / line["raw_tflops"] / 1e12 for line in lines)
        yield {
            "work": f"bf16 products of width {d}, 2 048 rows: {', '.join(shares)}",
            "Plimsoll": f"{sum(line['flops'] for line in lines) / seconds / 1e12:.2f} TFLOP/s",
            "PyTorch": "",
            "ratio": f"{100 * raw / seconds:.0f} % of the raw loop ({lines[0]['raw_loop']})",
            "bar": "55 %, aim 75 %",
        }


def throughput(which, args):
    """Throughput of one core, from the example `throughput` of crates/data."""
    command = [os.environ["THROUGHPUT"], "--only", which, "--rounds", str(5 * args.rounds)]
    command += ["--tokenizer", os.environ["TOKENIZER"]] if which == "bpe" else []
    # All rounds run in one process on the first core.
    one = str(min(os.sched_getaffinity(0)))
    text = subprocess.run(["taskset", "-c", one, *command], check=True, capture_output=True, text=True).stdout
    print(text.strip(), flush=True)
    of = lambda name: re.search(rf"^  {name}\s+(.*)$", text, re.M)[1].strip()
    if which == "orf":
        return {
            "work": "FASTA to ORF files, one core",
            "Plimsoll": of("to files"),
            "PyTorch": "",
            "ratio": "",
            "bar": "150 MB/s",
        }
    ratio = re.search(r"ratio to the better: ([\d.]+)", text)[1]
    better = max(of("tokenizers, no cache"), of("tokenizers, cache of words"), key=lambda line: float(line.split()[0]))
    return {
        "work": "BPE of reads of 500 bases, one core",
        "Plimsoll": of("plimsoll"),
        "PyTorch": f"tokenizers {better}",
        "ratio": ratio,
        "bar": "3, aim 10",
    }


def measured(row, args):
    if row == "gemm":
        yield from gemm(args)
    elif row in ("orf", "bpe"):
        yield throughput(row, args)
    else:
        yield models(row, args)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help=" ".join(ROWS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=1, help="timed passes of a side in a round")
    parser.add_argument("--dtype", action="append", choices=["bf16", "f32"], help="of the peers; both by default")
    parser.add_argument("--compile", action="store_true", help="torch.compile around the peers")
    args = parser.parse_args()
    if unknown := [row for row in args.rows if row not in ROWS]:
        parser.error(f"no row {unknown[0]}: there are {' '.join(ROWS)}")
    table = []
    for row in args.rows or ROWS:
        try:
            table += measured(row, args)
        except Exception as error:  # the other rows are still wanted
            why = getattr(error, "stderr", None) or error
            print(f"{row}: {type(error).__name__}: {why}", file=sys.stderr, flush=True)
    if table:
        print("\n| " + " | ".join(table[0]) + " |\n" + "|---" * len(table[0]) + "|")
    for line in table:
        print("| " + " | ".join(line.values()) + " |")


if __name__ == "__main__":
    main()
