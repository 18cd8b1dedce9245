"""PyTorch's side of attention's forward pass: bf16, 40 heads of 64, no mask, 65 536 tokens in sequences of one length.

    python bench/peers/attention.py [--length 168 1024 4096] [--heads 40] [--tokens 65536]

Sides: SDPA's backends on (B, H, L, D), contiguous and as the views that a fused projection gives, and varlen_attn on (T, H, D).
Ours: `cargo run --release -p plimsoll-cuda --example attention`. One line of JSON each: microseconds of the median launch by
events, TFLOP/s (4 operations for each pair of tokens and column). The operands are larger than the card's cache.
"""

import argparse
import statistics

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import timing

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
RUNS = 30


def microseconds(run):
    for _ in range(5):
        run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(RUNS + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(1000 * a.elapsed_time(b) for a, b in zip(events, events[1:]))


def sides(sequences, length, heads, dim):
    b, t = sequences, sequences * length
    contiguous = [torch.randn(b, heads, length, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    fused = torch.randn(b, length, 3, heads, dim, device="cuda", dtype=torch.bfloat16)
    views = list(fused.permute(2, 0, 3, 1, 4))
    for name, backend in BACKENDS.items():
        for layout, (q, k, v) in [("(B,H,L,D)", contiguous), ("views of a fused QKV", views)]:

            def run():
                with sdpa_kernel([backend]):
                    F.scaled_dot_product_attention(q, k, v)

            yield f"sdpa {name}", layout, run
    from torch.nn.attention.varlen import varlen_attn

    ends = torch.arange(0, t + 1, length, device="cuda", dtype=torch.int32)
    flat = fused.reshape(t, 3, heads, dim)
    q, k, v = flat[:, 0], flat[:, 1], flat[:, 2]
    yield "varlen_attn", "views of a fused QKV", lambda: varlen_attn(q, k, v, ends, ends, length, length)
    q, k, v = (x.contiguous() for x in (q, k, v))
    yield "varlen_attn", "(T,H,D)", lambda: varlen_attn(q, k, v, ends, ends, length, length)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--length", type=int, nargs="+", default=[51, 105, 168, 1024, 4096])
    parser.add_argument("--heads", type=int, default=40)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=65536)
    a = parser.parse_args()
    for length in a.length:
        sequences = a.tokens // length
        operations = 4 * sequences * length * length * a.heads * a.dim
        for side, layout, run in sides(sequences, length, a.heads, a.dim):
            row = {"side": side, "layout": layout, "length": length, "sequences": sequences, "heads": a.heads, "dim": a.dim}
            try:
                with torch.no_grad():
                    us = microseconds(run)
                timing.say(**row, microseconds=round(us, 1), tflops=round(operations / us / 1e6, 1))
            except Exception as error:  # noqa: BLE001  (a backend may not take a shape)
                timing.say(**row, failed=f"{type(error).__name__}: {error}"[:200])


main()
