"""Times torch.optim on the CPU, for comparison with `cargo run --release -p plimsoll-cpu --example optimizers`.

python bench/optimizers.py [threads [millions of elements]]
"""

import statistics
import sys
import time

import torch

TURNS = 15
threads = int(sys.argv[1]) if len(sys.argv) > 1 else 2
n = (int(sys.argv[2]) if len(sys.argv) > 2 else 32) * 1_000_000 // 4096 * 4096
torch.set_num_threads(threads)

p = torch.nn.Parameter(torch.randn(n))
p.grad = torch.randn(n)
settings = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
sides = {
    "adamw fused": torch.optim.AdamW([p], fused=True, **settings).step,
    "adamw foreach": torch.optim.AdamW([p], foreach=True, **settings).step,
    "sgd, momentum, fused": torch.optim.SGD([p], lr=1e-3, momentum=0.9, weight_decay=0.1, fused=True).step,
    "norm": lambda: torch.nn.utils.get_total_norm([p.grad]),
}
seconds = {name: [] for name in sides}
for turn in range(TURNS + 1):
    for name, step in sides.items():
        start = time.perf_counter()
        step()
        if turn:
            seconds[name].append(time.perf_counter() - start)
print(f"torch {torch.__version__} x {threads}; {n} elements; medians of {TURNS} turns")
for name, s in seconds.items():
    print(f"{name:>22} {1e3 * statistics.median(s):8.2f} ms")
