"""PyTorch's side of the GPU figures: ESM-2 in bf16 with random weights, on the first GPU.

    python bench/peers/esm2.py [--model 3B ...] [--pack 16384] [--length 168 | --lognormal] [--side packed sdpa] [--seconds 3]

Sides: `packed` is a model packed by hand: fused query, key and value, variable-length flash attention, under torch.compile
(the fastest PyTorch that we know); `sdpa` is transformers' EsmModel with SDPA under torch.compile, `sdpa-eager` without.
Sequences of several lengths reach transformers padded and sorted by length. One line of JSON for each side and pack:
tokens/s of the median pass, real tokens only, and the peak of torch's allocator.
"""

import argparse
import itertools

import torch
import torch.nn as nn
import torch.nn.functional as F

import timing

SIZES = {  # width, heads, feed-forward, layers
    "8M": (320, 20, 1280, 6),
    "35M": (480, 20, 1920, 12),
    "150M": (640, 20, 2560, 30),
    "650M": (1280, 20, 5120, 33),
    "3B": (2560, 40, 10240, 36),
}
STEP = 32  # padded lengths are a multiple of it, so that kernels see few shapes


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


def pack(lengths, size):
    """Ids, positions and ends of a pack. The unused tokens form one more sequence, so that the shape is fixed."""
    rest = size - sum(lengths)
    lengths = lengths + ([rest] if rest else [])
    ends = torch.tensor([0] + lengths, device="cuda").cumsum(0).int()
    torch._dynamo.mark_dynamic(ends, 0)
    positions = torch.cat([torch.arange(n) for n in lengths]).cuda()
    return torch.randint(4, 24, (size,), device="cuda"), positions, ends


def packed(a, name, size, lengths, compiled):
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = Packed(*SIZES[name]).eval()
        torch.set_default_dtype(torch.float32)
    model = torch.compile(model) if compiled else model
    longest = max(lengths)
    chosen = some(timing.packs(lengths, size), size, a)
    return lambda b: model(*b, longest), [pack(p, size) for p in chosen], sum(map(sum, chosen))


def some(batches, size, a):
    """One batch if all have equal lengths, otherwise a sample of batches."""
    batches = list(batches)
    count = max(4, 8 * 16384 // size) if a.lognormal else 1
    # The sample covers all lengths, because padded batches are sorted by length.
    return batches[:: max(1, len(batches) // count)][:count]


def sdpa(a, name, size, lengths, compiled):
    from transformers import EsmConfig, EsmModel

    d, heads, inner, layers = SIZES[name]
    config = EsmConfig(
        vocab_size=33,
        hidden_size=d,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=inner,
        position_embedding_type="rotary",
        token_dropout=True,
        mask_token_id=32,
        pad_token_id=1,
        attention_probs_dropout_prob=0.0,
        hidden_dropout_prob=0.0,
        emb_layer_norm_before=False,
        attn_implementation="sdpa",
    )
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = EsmModel(config, add_pooling_layer=False).eval()
        torch.set_default_dtype(torch.float32)
    model = torch.compile(model, dynamic=a.lognormal) if compiled else model
    chosen = some(timing.padded(lengths, size, STEP if a.lognormal else 1), size, a)
    batches = [pad(p, STEP if a.lognormal else 1) for p in chosen]
    run = lambda b: model(input_ids=b[0], attention_mask=b[1]).last_hidden_state
    return run, batches, sum(map(sum, chosen))


def pad(lengths, step):
    """Ids, and the mask of tokens that are not padding; `None` without padding."""
    width = -(-max(lengths) // step) * step
    ids = torch.randint(4, 24, (len(lengths), width), device="cuda")
    mask = torch.arange(width, device="cuda") < torch.tensor(lengths, device="cuda")[:, None]
    return (ids, None) if bool(mask.all()) else (ids.masked_fill(~mask, 1), mask.long())


SIDES = {
    "packed": (packed, True),
    "packed-eager": (packed, False),
    "sdpa": (sdpa, True),
    "sdpa-eager": (sdpa, False),
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=SIZES, nargs="+", default=["3B"])
    parser.add_argument("--pack", type=int, nargs="+", default=[16384])
    parser.add_argument("--length", type=int, default=168)
    parser.add_argument("--lognormal", action="store_true", help="lengths exp N(5.6, 0.75), from 30 to 1022, and 2")
    parser.add_argument("--side", choices=SIDES, nargs="+", default=["packed"])
    parser.add_argument("--seconds", type=float, default=3.0)
    a = parser.parse_args()
    for model, size, side in itertools.product(a.model, a.pack, a.side):
        lengths = timing.lognormal(40000) if a.lognormal else [a.length] * (size // a.length)
        make, compiled = SIDES[side]
        shape = {"model": model, "pack": size, "lengths": "lognormal" if a.lognormal else a.length}
        timing.measured(side, lambda: make(a, model, size, lengths, compiled), a.seconds, **shape)


main()
