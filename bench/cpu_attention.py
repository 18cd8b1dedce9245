"""Times attention, forward and backward, in PyTorch (SDPA) and in Plimsoll, alternating on equal cores.

Plimsoll is measured by `cargo build --release -p plimsoll-cpu --example attention`, which has equal shapes. Masks for
which SDPA has no flag are passed as a boolean matrix. Prints, for each shape, the medians over the rounds in ms and
the ratio of PyTorch's time to Plimsoll's. `peer-venv/bin/python bench/cpu_attention.py target/release/examples/attention [rounds]`.
"""

import statistics
import subprocess
import sys
import time

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

THREADS = 2
TURNS = 5
# As in crates/cpu/examples/attention.rs: heads, heads of k and v, head dim, length, sequences, mask.
SHAPES = [
    (8, 8, 64, 512, 4, "full"),
    (8, 8, 64, 512, 4, "causal"),
    (8, 2, 64, 512, 4, "causal"),
    (20, 20, 24, 512, 4, "full"),
    (8, 8, 32, 128, 16, "causal"),
    (8, 8, 128, 512, 4, "causal"),
    (8, 8, 64, 2048, 1, "causal"),
    (8, 8, 64, 2048, 1, ("window", 256)),
    (8, 8, 64, 2048, 1, ("sparse", 64, 4, 1)),
]


def visible(mask, n):
    """Boolean matrix of a mask for which SDPA has no flag."""
    i, j = torch.arange(n)[:, None], torch.arange(n)[None, :]
    if mask[0] == "window":
        return (j <= i) & (i - j < mask[1])
    _, block, local, near = mask
    return (j <= i) & ((i // block - j // block < local) | (j // block < near))


def operand(batch, length, heads, dim):
    """A (B, H, L, d) view of a (B, L, H d) tensor, as in a model."""
    x = torch.randn(batch, length, heads * dim, requires_grad=True)
    return x, x.view(batch, length, heads, dim).transpose(1, 2)


def theirs(shape):
    """Medians of one round in ms: forward, backward."""
    heads, kv_heads, dim, length, batch, mask = shape
    (q_, q), (k_, k), (v_, v) = (operand(batch, length, h, dim) for h in (heads, kv_heads, kv_heads))
    matrix = visible(mask, length) if isinstance(mask, tuple) else None
    forward, backward = [], []
    for turn in range(TURNS + 1):
        start = time.perf_counter()
        o = sdpa(q, k, v, attn_mask=matrix, is_causal=mask == "causal", enable_gqa=heads != kv_heads)
        middle = time.perf_counter()
        torch.autograd.grad(o, (q_, k_, v_), torch.ones_like(o), retain_graph=False)
        if turn:
            forward.append(middle - start)
            backward.append(time.perf_counter() - middle)
        # The backward pass has freed the graph, which includes the views, so they are created again.
        q, k, v = (x.view(batch, length, h, dim).transpose(1, 2)
                   for x, h in ((q_, heads), (k_, kv_heads), (v_, kv_heads)))
    return 1e3 * statistics.median(forward), 1e3 * statistics.median(backward)


def ours(binary):
    """Medians of Plimsoll for every shape, from the table that the example prints."""
    table = subprocess.run([binary, str(THREADS)], check=True, capture_output=True, text=True).stdout
    rows = [line.rsplit("|", 1)[0].split() for line in table.splitlines()[2:]]
    return [(float(row[-2]), float(row[-1])) for row in rows]


def main():
    binary, rounds = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 5
    torch.set_num_threads(THREADS)
    print(f"torch {torch.__version__}, {THREADS} threads, medians of {rounds} rounds, ms")
    mine, peer = [], []
    for _ in range(rounds):
        mine.append(ours(binary))
        peer.append([theirs(shape) for shape in SHAPES])
    print(f"{'':>48} {'forward: ours':>14} {'torch':>8} {'x':>6} {'backward: ours':>15} {'torch':>8} {'x':>6}")
    for n, shape in enumerate(SHAPES):
        a, b, c, d = (statistics.median(side[r][n][which] for r in range(rounds))
                      for which in (0, 1) for side in (mine, peer))
        print(f"{shape!s:>48} {a:>14.2f} {b:>8.2f} {b / a:>6.2f} {c:>15.2f} {d:>8.2f} {d / c:>6.2f}")


if __name__ == "__main__":
    main()
