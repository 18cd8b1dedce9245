"""The CPU's table: every row's two sides by turns in one run, medians and ratios. Run by cpu.sh, which says what the rows are.

The peers stay loaded, so that a turn is passes alone; a peer's threads are asleep before the other side's turn begins.
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
# What each row is to reach, and what it is hoped to.
BARS = {"8M": (8, 20), "35M": (8, 20), "150M": (8, 15), "650M": (5, 10), "dnabert": (8, 15), "f32": (3, 4)}
# (N, K) of a layer's products: q, k and v as one, their way out, and the two of the feed-forward.
GEMM = {d: [(3 * d, d), (d, d), (4 * d, d), (d, 4 * d)] for d in (640, 1280)}
ROWS = [*BARS, "gemm", "orf", "bpe"]
# A peer's threads spin for so long after their last work (OpenMP's default), in seconds.
ASLEEP = 0.3


def say(**line):
    print(json.dumps(line), flush=True)


def plimsoll(threads, precision, *what, repeats):
    """One run of `plimsoll bench`: its object."""
    command = [os.environ["PLIMSOLL"], "bench", "--device", "cpu", "--threads", str(threads), "--precision", precision]
    done = subprocess.run([*command, *what, "--repeats", str(repeats), "--json"], check=True, capture_output=True, text=True)
    line = json.loads(done.stdout)
    print(done.stdout.strip(), flush=True)
    return line


class Peer:
    """PyTorch's side of a row in one dtype, built and warm."""

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
        # The largest would take minutes: a part of the batch has warmed its threads and weights just as well.
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
    """Rounds of our side and theirs; a line of the table."""
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
    """Products at 2 048 rows: shares of the raw loop, and all of a model's together."""
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
    """One core, from the example of crates/data; its first figure of this name."""
    command = [os.environ["THROUGHPUT"], "--only", which, "--rounds", str(5 * args.rounds)]
    command += ["--tokenizer", os.environ["TOKENIZER"]] if which == "bpe" else []
    # All rounds are in one process, on the first of the cores.
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
