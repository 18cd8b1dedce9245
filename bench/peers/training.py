"""The PyTorch peer of bench/train_gpu.py: ESM-2 masked LM with packed sequences, variable-length flash attention and
torch.compile, bf16 autocast, f32 weights, fused AdamW and clipping; or LoRA adapters of qkv and out over bf16 weights.

    python3 bench/peers/training.py WIDTH HEADS LAYERS TOKENS LORA_RANK

Prints tokens/s: the mean of five steps after three. One micro-batch of exactly TOKENS tokens a step.
"""

import sys
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn

WARM, STEPS, LONGEST = 3, 5, 1024


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, cos, sin, ends):
        tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(tokens, 3, self.heads, width // self.heads).unbind(1)

        def rotate(a):
            low, high = a.chunk(2, -1)
            return (a * cos + torch.cat((-high, low), -1) * sin).to(v.dtype)

        a = varlen_attn(rotate(q), rotate(k), v.contiguous(), ends, ends, LONGEST, LONGEST)
        x = x + self.out(a.reshape(tokens, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, width, heads, layers):
        super().__init__()
        self.embed = nn.Embedding(33, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm, self.head, self.dim = nn.LayerNorm(width), nn.Linear(width, 33), width // heads

    def forward(self, ids, positions, ends, targets):
        inverse = 1.0 / (10000 ** (torch.arange(0, self.dim, 2, device=ids.device).float() / self.dim))
        angles = positions.float()[:, None] * inverse
        angles = torch.cat((angles, angles), -1)[:, None]
        cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, cos, sin, ends)
        return F.cross_entropy(self.head(self.norm(x)).float(), targets)


class Adapted(nn.Module):
    def __init__(self, base, rank):
        super().__init__()
        self.base = base
        self.a, self.b = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def main():
    width, heads, layers, tokens, rank = map(int, sys.argv[1:])
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    generator = torch.Generator().manual_seed(7)
    drawn = (torch.exp(torch.randn(4000, generator=generator) * 0.75 + 5.6).clamp(30, 1022).long() + 2).tolist()
    with torch.device("cuda"):
        model = Model(width, heads, layers)
    trained = list(model.parameters())
    if rank > 0:
        model.requires_grad_(False).bfloat16()
        for layer in model.layers:
            layer.qkv, layer.out = Adapted(layer.qkv, rank).cuda(), Adapted(layer.out, rank).cuda()
        adapters = [module for module in model.modules() if isinstance(module, Adapted)]
        trained = [p for module in adapters for part in (module.a, module.b) for p in part.parameters()]
        for parameter in trained:
            parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    lengths, total = [], 0
    for length in drawn:
        if total + length > tokens:
            break
        lengths.append(length)
        total += length
    if total < tokens:
        lengths.append(tokens - total)
    ends = torch.tensor([0] + lengths, device="cuda").cumsum(0).int()
    positions = torch.cat([torch.arange(length) for length in lengths]).cuda()
    ids = torch.randint(4, 24, (tokens,), device="cuda")
    targets = ids.clone()
    targets[torch.rand(tokens, device="cuda") > 0.15] = -100
    compiled = torch.compile(model)

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            loss = compiled(ids, positions, ends, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(WARM):
        step()
    torch.cuda.synchronize()
    start = time.time()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    print(tokens * STEPS / (time.time() - start))


if __name__ == "__main__":
    main()
