"""Times DNABERT-S's arithmetic in PyTorch on CPU cores: reads of 500 bases, about 105 tokens each.

The layers are those of peers/dnabert_s.py with random weights: post-norm, gated MLP with the exact GELU, ALiBi as SDPA's
additive mask. All reads have an equal number of tokens, so nothing is padded. One JSON line per dtype, with the keys of
cpu_esm2.py; `--compile` puts torch.compile around the model.
"""

import sys
from pathlib import Path

import torch

from cpu_timing import DTYPES, options, say, timed

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))
from dnabert_s import SLOPES, VOCABULARY, Masked, Model  # noqa: E402


def build(dtype, length, compiled):
    """(model, its mask): bias -slope |i - j| for each head, (1, heads, length, length)."""
    model = Masked(Model()).eval().to(DTYPES[dtype])
    positions = torch.arange(length)
    bias = -torch.tensor(SLOPES)[:, None, None] * (positions[:, None] - positions).abs()
    return torch.compile(model) if compiled else model, bias[None].to(DTYPES[dtype])


def measure(model, bias, ids, warmup, repeats):
    """Seconds of each timed forward pass, without the warm-up passes."""
    return timed(lambda: model(ids, bias), warmup, repeats)


def main():
    parser = options(__doc__, 64, 105)
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    for dtype in args.dtype or ["f32"]:
        ids = torch.randint(5, VOCABULARY, (args.batch, args.length))
        seconds = measure(*build(dtype, args.length, args.compile), ids, args.warmup, args.repeats)
        say("torch.compile" if args.compile else "torch", "zhihan1996/DNABERT-S", dtype, args, seconds)


if __name__ == "__main__":
    main()
