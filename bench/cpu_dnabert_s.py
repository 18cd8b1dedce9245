"""Times DNABERT-S's arithmetic in PyTorch on CPU cores: reads of 500 bases, about 105 tokens each.

The layers are those of peers/dnabert_s.py with random weights: post-norm, gated MLP with the exact GELU, ALiBi as SDPA's
additive mask. All reads have the same number of tokens, so nothing is padded. One JSON line per dtype, with the keys of
cpu_esm2.py's; `--compile` puts torch.compile around the model.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))
from dnabert_s import SLOPES, VOCABULARY, Masked, Model  # noqa: E402

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def build(dtype, length, compiled):
    """(model, its mask): bias -slope |i - j| for each head, (1, heads, length, length)."""
    model = Masked(Model()).eval().to(DTYPES[dtype])
    positions = torch.arange(length)
    bias = -torch.tensor(SLOPES)[:, None, None] * (positions[:, None] - positions).abs()
    return torch.compile(model) if compiled else model, bias[None].to(DTYPES[dtype])


def measure(model, bias, ids, warmup, repeats):
    """Seconds of each repeated forward pass, after the warm-up ones."""
    seconds = []
    with torch.inference_mode():
        for _ in range(warmup + repeats):
            start = time.perf_counter()
            model(ids, bias)
            seconds.append(time.perf_counter() - start)
    return seconds[warmup:]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", action="append", choices=sorted(DTYPES), help="repeatable; f32 by default")
    parser.add_argument("--batch", type=int, default=64, help="reads")
    parser.add_argument("--length", type=int, default=105, help="tokens of each, with [CLS] and [SEP]")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    for dtype in args.dtype or ["f32"]:
        ids = torch.randint(5, VOCABULARY, (args.batch, args.length))
        seconds = measure(*build(dtype, args.length, args.compile), ids, args.warmup, args.repeats)
        line = {
            "side": "torch.compile" if args.compile else "torch",
            "model": "zhihan1996/DNABERT-S",
            "dtype": dtype,
            "batch": args.batch,
            "length": args.length,
            "threads": args.threads,
            "tokens_per_s": args.batch * args.length / statistics.median(seconds),
            "seconds": seconds,
            "torch": torch.__version__,
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
