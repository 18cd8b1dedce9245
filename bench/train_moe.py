"""PyTorch's side of the training figures: the moe-mini language model, eager or compiled, on the CPU.

    python bench/train_moe.py [--steps 12] [--mode eager|compile] [--threads 2]

Sequences of equal length in a batch (no padding), SDPA's causal attention, one index per expert, fused AdamW, a clip of
the global norm: what a careful user of PyTorch writes. Prints tokens/s of the median step and the peak of the process.
"""

import argparse
import math
import resource
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, d, heads, inner, experts, k):
        super().__init__()
        self.heads, self.k = heads, k
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.router = nn.Linear(d, experts)
        self.up = nn.ModuleList(nn.Linear(d, inner) for _ in range(experts))
        self.down = nn.ModuleList(nn.Linear(inner, d) for _ in range(experts))

    def attend(self, x, cos, sin):
        b, s, d = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        turn = lambda t: torch.cat([-t[..., t.shape[-1] // 2 :], t[..., : t.shape[-1] // 2]], -1)
        q, k = q * cos + turn(q) * sin, k * cos + turn(k) * sin
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(o.transpose(1, 2).reshape(b, s, d))

    def experts(self, x):
        p = self.router(x).softmax(-1)
        gates, chosen = p.topk(self.k, -1)
        gates = gates / gates.sum(-1, keepdim=True)
        y = torch.zeros_like(x)
        for e, (up, down) in enumerate(zip(self.up, self.down)):
            row, slot = torch.where(chosen == e)
            part = down(F.gelu(up(x[row])))
            y = y.index_add(0, row, part * gates[row, slot, None])
        share = torch.bincount(chosen.flatten(), minlength=len(self.up)) / chosen.numel()
        return y, len(self.up) * (share * p.mean(0)).sum()

    def forward(self, x, cos, sin):
        x = x + self.attend(self.norm1(x), cos, sin)
        y, aux = self.experts(self.norm2(x).flatten(0, 1))
        return x + y.view_as(x), aux


class Model(nn.Module):
    def __init__(self, v, d, layers, heads, inner, experts, k):
        super().__init__()
        self.table = nn.Embedding(v, d)
        self.blocks = nn.ModuleList(Block(d, heads, inner, experts, k) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, v, bias=False)
        self.dim = d // heads

    def forward(self, ids, targets):
        freq = 1e4 ** (-torch.arange(0, self.dim, 2) / self.dim)
        angle = torch.arange(ids.shape[1])[:, None] * freq
        cos, sin = [torch.cat([f, f], -1) for f in (angle.cos(), angle.sin())]
        x, aux = self.table(ids), 0.0
        for block in self.blocks:
            x, a = block(x, cos, sin)
            aux = aux + a / len(self.blocks)
        loss = F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())
        return loss, aux


def main():
    parser = argparse.ArgumentParser()
    for name, value in dict(steps=12, threads=2, vocab=256, hidden=256, layers=4, heads=4, inner=512, experts=8, top_k=2, batch=8, length=256).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--mode", choices=["eager", "compile"], default="eager")
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = Model(a.vocab, a.hidden, a.layers, a.heads, a.inner, a.experts, a.top_k)
    parameters = sum(p.numel() for p in model.parameters())
    step_of = torch.compile(model) if a.mode == "compile" else model
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    times = []
    for _ in range(a.steps):
        ids = torch.randint(0, a.vocab, (a.batch, a.length + 1))
        start = time.perf_counter()
        loss, aux = step_of(ids[:, :-1], ids[:, 1:])
        (loss + 0.01 * aux).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad(set_to_none=True)
        times.append(time.perf_counter() - start)
    median = statistics.median(times[min(3, len(times) - 1) :])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(
        f"torch {torch.__version__} {a.mode}: {a.batch * a.length / median:.0f} tokens/s, {parameters} parameters, "
        f"peak {peak // 1024} MiB, above the import {(peak - before) // 1024} MiB, loss {loss.item():.3f} of ln V {math.log(a.vocab):.3f}"
    )


main()
