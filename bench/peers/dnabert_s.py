"""PyTorch's side of DNABERT-S: its arithmetic in bf16 with random weights, reads of 500 bases (about 105 tokens).

    python bench/peers/dnabert_s.py [--pack 16384 65536] [--side sdpa flex packed] [--length 105] [--seconds 3]

The hub's own code needs a kernel of an old Triton, so the layers are written here: post-norm, symmetric ALiBi, gated MLP with
the exact GELU. Sides, all under torch.compile, the best of which counts: `sdpa` batches of one length (no padding at all) with
ALiBi as SDPA's additive mask; `padded` these batches sorted by length and padded to a multiple of 8, with the padding in the mask;
`flex` batches of one length with flex_attention, ALiBi as a score_mod; `packed` one long sequence with flex_attention and a
block mask of its reads (made beforehand, not timed). Lengths are 95 to 115, or all --length. Lines as esm2.py's.
"""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import timing

D, HEADS, INNER, LAYERS, VOCABULARY = 768, 12, 3072, 12, 4096
LONGEST = 128
SLOPES = [2.0**-i for i in range(1, 9)] + [2.0 ** -(i + 0.5) for i in range(4)]  # Press et al. 2022, 12 heads


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.norm1 = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.LayerNorm(D, eps=1e-12)
        self.gated, self.down = nn.Linear(D, 2 * INNER, bias=False), nn.Linear(INNER, D)
        self.norm2 = nn.LayerNorm(D, eps=1e-12)

    def forward(self, x, attend):
        b, s, _ = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, HEADS, D // HEADS).permute(2, 0, 3, 1, 4)
        a = attend(q, k, v).transpose(1, 2).reshape(b, s, D)
        x = self.norm1(x + self.out(a))
        gate, up = self.gated(x).chunk(2, -1)
        return self.norm2(x + self.down(F.gelu(gate) * up))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.types = nn.Embedding(VOCABULARY, D), nn.Embedding(2, D)
        self.norm = nn.LayerNorm(D, eps=1e-12)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, ids, attend):
        x = self.norm(self.words(ids) + self.types.weight[0])
        for layer in self.layers:
            x = layer(x, attend)
        return x


class Masked(nn.Module):
    """SDPA with an additive mask."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, mask):
        return self.model(ids, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


class Flexible(nn.Module):
    """flex_attention with or without a block mask."""

    def __init__(self, model, slopes):
        super().__init__()
        self.model, self.slopes = model, slopes

    def forward(self, ids, blocks):
        slopes = self.slopes

        def alibi(score, b, h, i, j):
            return score - slopes[h] * (i - j).abs()

        return self.model(ids, lambda q, k, v: flex_attention(q, k, v, score_mod=alibi, block_mask=blocks))


def model():
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        made = Model().eval()
        torch.set_default_dtype(torch.float32)
        slopes = torch.tensor(SLOPES)
        positions = torch.arange(LONGEST)
    # Rows have a multiple of 8 columns, which the kernels need. A batch uses the upper left corner.
    bias = (-slopes[:, None, None] * (positions[:, None] - positions).abs())[None].to(torch.bfloat16)
    return made, slopes, bias  # bias: (1, HEADS, LONGEST, LONGEST)


def of_one_length(lengths, size):
    """Batches of sequences of equal length."""
    for n in sorted(set(lengths)):
        yield from timing.packs([n] * lengths.count(n), size)


def ids(*shape):
    return torch.randint(5, VOCABULARY, shape, device="cuda")


def sdpa(size, lengths, backends):
    made, _, bias = model()
    batches = list(of_one_length(lengths, size))
    run = torch.compile(Masked(made), dynamic=len(set(lengths)) > 1)

    def step(batch):
        with sdpa_kernel(backends):
            run(*batch)

    made = [(ids(len(b), b[0]), bias[:, :, : b[0], : b[0]]) for b in batches]
    return step, made, sum(map(sum, batches))


def padded(size, lengths):
    made, _, bias = model()
    batches = list(timing.padded(lengths, size, 8))

    def whole(batch):
        width = -(-max(batch) // 8) * 8
        real = torch.arange(width, device="cuda") < torch.tensor(batch, device="cuda")[:, None]
        hidden = torch.zeros(real.shape, device="cuda", dtype=torch.bfloat16).masked_fill(~real, -torch.inf)
        return ids(len(batch), width), bias[:, :, :width, :width] + hidden[:, None, None, :]

    run = torch.compile(Masked(made))
    return lambda b: run(*b), [whole(b) for b in batches], sum(map(sum, batches))


def flex(size, lengths):
    made, slopes, _ = model()
    batches = list(of_one_length(lengths, size))
    run = torch.compile(Flexible(made, slopes), dynamic=len(set(lengths)) > 1)
    return lambda b: run(b, None), [ids(len(b), b[0]) for b in batches], sum(map(sum, batches))


def packed(size, lengths):
    made, slopes, _ = model()
    batches = list(timing.packs(lengths, size))
    run = torch.compile(Flexible(made, slopes))

    def whole(batch):
        rest = size - sum(batch)
        reads = torch.tensor(batch + ([rest] if rest else []), device="cuda")
        read = torch.repeat_interleave(torch.arange(len(reads), device="cuda"), reads)
        same = lambda b, h, i, j: read[i] == read[j]
        return ids(1, size), create_block_mask(same, 1, 1, size, size, device="cuda", _compile=True)

    return lambda b: run(*b), [whole(b) for b in batches], sum(map(sum, batches))


EFFICIENT = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
CUDNN = [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
SIDES = {
    "sdpa": lambda size, lengths: sdpa(size, lengths, EFFICIENT),
    "sdpa-cudnn": lambda size, lengths: sdpa(size, lengths, CUDNN),
    "padded": padded,
    "flex": flex,
    "packed": packed,
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--pack", type=int, nargs="+", default=[16384])
    parser.add_argument("--length", type=int, help="all reads so long, instead of 95 to 115 tokens")
    parser.add_argument("--side", choices=SIDES, nargs="+", default=list(SIDES))
    parser.add_argument("--seconds", type=float, default=3.0)
    a = parser.parse_args()
    torch._dynamo.config.cache_size_limit = 64
    for size in a.pack:
        count = 4 * size // 105
        lengths = torch.randint(95, 116, (count,), generator=torch.Generator().manual_seed(7)).tolist()
        lengths = [a.length] * (size // a.length) if a.length else lengths
        for side in a.side:
            shape = {"model": "DNABERT-S", "pack": size, "lengths": a.length or "95 to 115"}
            timing.measured(side, lambda: SIDES[side](size, lengths), a.seconds, **shape)


if __name__ == "__main__":
    main()
