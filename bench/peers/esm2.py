"""PyTorch's side of the GPU figures: ESM-2 in bf16 with random weights, on the first GPU.

    python bench/peers/esm2.py [--model 3B] [--pack 16384] [--length 168 | --lognormal] [--side packed sdpa] [--seconds 3]

Sides: `sdpa` is transformers' EsmModel with SDPA under torch.compile; `packed` is a model packed by hand: fused query, key
and value, variable-length flash attention, under torch.compile (the fastest PyTorch that we know). Prints one JSON line
for each side and pack: tokens/s of the median pass, real tokens only, and the peak of torch's allocator.
"""

import argparse
import json
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

SIZES = {  # width, heads, feed-forward, layers
    "8M": (320, 20, 1280, 6),
    "35M": (480, 20, 1920, 12),
    "150M": (640, 20, 2560, 30),
    "650M": (1280, 20, 5120, 33),
    "3B": (2560, 40, 10240, 36),
}


class Layer(nn.Module):
    def __init__(self, d, heads, inner):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, inner), nn.Linear(inner, d)

    def forward(self, x, cos, sin, ends, longest):
        from torch.nn.attention.varlen import varlen_attn

        t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(t, 3, self.heads, d // self.heads).unbind(1)

        def rotate(a):
            one, two = a.chunk(2, -1)
            return (a * cos + torch.cat((-two, one), -1) * sin).to(a.dtype)

        a = varlen_attn(rotate(q), rotate(k), v.contiguous(), ends, ends, longest, longest)
        x = x + self.out(a.reshape(t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Packed(nn.Module):
    def __init__(self, d, heads, inner, layers):
        super().__init__()
        self.table = nn.Embedding(33, d)
        self.layers = nn.ModuleList(Layer(d, heads, inner) for _ in range(layers))
        self.norm, self.dim = nn.LayerNorm(d), d // heads

    def forward(self, ids, positions, ends, longest: int):
        frequencies = 1.0 / (10000 ** (torch.arange(0, self.dim, 2, device=ids.device).float() / self.dim))
        angles = positions.float()[:, None] * frequencies
        angles = torch.cat((angles, angles), -1)[:, None]
        cos, sin = angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x, cos, sin, ends, longest)
        return self.norm(x)


def packs(lengths, size):
    """Lengths cut into packs of at most `size` tokens, in order."""
    pack, filled = [], 0
    for n in lengths:
        if filled + n > size:
            yield pack
            pack, filled = [], 0
        pack.append(n)
        filled += n


def batch(lengths, size):
    """Ids, positions, ends and the real tokens of a pack; what is left of it is one more sequence, for a fixed shape."""
    real = sum(lengths)
    lengths = lengths + ([size - real] if real < size else [])
    ends = torch.tensor([0] + lengths, device="cuda").cumsum(0).int()
    positions = torch.cat([torch.arange(n) for n in lengths]).cuda()
    return (torch.randint(4, 24, (size,), device="cuda"), positions, ends), real


def timed(run, batches, seconds):
    """Seconds of each pass over `batches`."""
    with torch.no_grad():
        for b in batches[:2] * 2:
            run(b)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        times, start = [], time.perf_counter()
        while len(times) < 3 or time.perf_counter() - start < seconds:
            begin = time.perf_counter()
            for b in batches:
                run(b)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
    return times


def packed(a, size, lengths):
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = Packed(*SIZES[a.model]).eval()
        torch.set_default_dtype(torch.float32)
    model = torch.compile(model)
    made = [batch(p, size) for _, p in zip(range(1 if not a.lognormal else max(4, 8 * 16384 // size)), packs(lengths, size))]
    longest = 1024 if a.lognormal else a.length
    times = timed(lambda b: model(*b, longest), [b for b, _ in made], a.seconds)
    return sum(real for _, real in made), times


def sdpa(a, size, lengths):
    from transformers import EsmConfig, EsmModel

    d, heads, inner, layers = SIZES[a.model]
    config = EsmConfig(vocab_size=33, hidden_size=d, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=inner, position_embedding_type="rotary", token_dropout=True, mask_token_id=32, pad_token_id=1, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0, emb_layer_norm_before=False)
    model = EsmModel(config, add_pooling_layer=False).to("cuda", torch.bfloat16).eval()
    model = torch.compile(model)
    n = size // a.length
    ids = torch.randint(4, 24, (n, a.length), device="cuda")
    times = timed(lambda b: model(input_ids=b).last_hidden_state, [ids], a.seconds)
    return n * a.length, times


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=SIZES, default="3B")
    parser.add_argument("--pack", type=int, nargs="+", default=[16384])
    parser.add_argument("--length", type=int, default=168)
    parser.add_argument("--lognormal", action="store_true", help="lengths exp N(5.6, 0.75), from 30 to 1022, and 2")
    parser.add_argument("--side", choices=["packed", "sdpa"], nargs="+", default=["packed"])
    parser.add_argument("--seconds", type=float, default=3.0)
    a = parser.parse_args()
    random = torch.Generator().manual_seed(7)
    for size in a.pack:
        if a.lognormal:
            lengths = ((torch.randn(40000, generator=random) * 0.75 + 5.6).exp().clamp(30, 1022).long() + 2).tolist()
        else:
            lengths = [a.length] * (size // a.length) * 2
        for side in a.side:
            tokens, times = {"packed": packed, "sdpa": sdpa}[side](a, size, lengths)
            print(json.dumps({"side": f"torch {torch.__version__} {side} compiled", "model": a.model, "pack": size, "lengths": "lognormal" if a.lognormal else a.length, "tokens_per_s": round(tokens / statistics.median(times)), "peak_bytes": torch.cuda.max_memory_allocated(), "passes": len(times)}), flush=True)
            torch._dynamo.reset()
            torch.cuda.empty_cache()


main()
