"""The PyTorch peer of bench/train_gpu.py for language models: a decoder with SwiGLU (llama), or a mixture of experts (moe),
with torch.compile, causal attention of torch (flash attention), bf16 autocast, f32 weights, fused AdamW and clipping.

    python3 bench/peers/language_model.py llama|moe

Prints tokens/s: the mean of five steps after three. A step is one micro-batch of 16 384 tokens.
"""

import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

WARM, STEPS = 3, 5
# Vocabulary, width, heads, width of the MLP, layers, tokens of a sequence, sequences
LLAMA = (32000, 2048, 16, 5504, 24, 4096, 4)
MOE = (65536, 768, 12, 3072, 16, 2048, 8)
EXPERTS, CHOSEN = 16, 2


class Gated(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x):
        gate, up = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Mixture(nn.Module):
    """Experts without gates; the rows of each expert are gathered, so that no token is dropped."""

    def __init__(self, width, inner):
        super().__init__()
        self.router = nn.Linear(width, EXPERTS, bias=False)
        self.up = nn.Parameter(0.02 * torch.randn(EXPERTS, width, inner))
        self.down = nn.Parameter(0.02 * torch.randn(EXPERTS, inner, width))

    def forward(self, x):
        rows = x.flatten(0, 1)
        weights, experts = self.router(rows).float().softmax(-1).topk(CHOSEN, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        chosen = experts.flatten()
        order = chosen.argsort(stable=True)
        ends = torch.bincount(chosen, minlength=EXPERTS).cumsum(0).to(torch.int32)
        hidden = torch._grouped_mm(rows[order // CHOSEN].bfloat16(), self.up.bfloat16(), offs=ends)
        out = torch._grouped_mm(F.gelu(hidden), self.down.bfloat16(), offs=ends)
        out = (out * weights.flatten()[order].unsqueeze(-1)).float()
        sums = torch.zeros_like(rows, dtype=torch.float32).index_add(0, order // CHOSEN, out)
        return sums.to(x.dtype).view_as(x)


class Layer(nn.Module):
    def __init__(self, width, heads, inner, mixture):
        super().__init__()
        norm = nn.LayerNorm if mixture else nn.RMSNorm
        self.heads, self.norm1, self.norm2 = heads, norm(width), norm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=mixture), nn.Linear(width, width, bias=mixture)
        self.mlp = Mixture(width, inner) if mixture else Gated(width, inner)

    def forward(self, x, cos, sin):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)

        def rotate(a):
            low, high = a.chunk(2, -1)
            return (a * cos + torch.cat((-high, low), -1) * sin).to(v.dtype)

        a = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, mixture, vocabulary, width, heads, inner, layers):
        super().__init__()
        self.embed, self.dim = nn.Embedding(vocabulary, width), width // heads
        self.layers = nn.ModuleList(Layer(width, heads, inner, mixture) for _ in range(layers))
        self.norm = nn.LayerNorm(width) if mixture else nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids, targets):
        inverse = 1.0 / (10000 ** (torch.arange(0, self.dim, 2, device=ids.device).float() / self.dim))
        angles = torch.arange(ids.shape[1], device=ids.device).float()[:, None] * inverse
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


def main():
    mixture = sys.argv[1] == "moe"
    *sizes, length, batch = MOE if mixture else LLAMA
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    with torch.device("cuda"):
        model = Model(mixture, *sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, sizes[0], (batch, length), device="cuda")
    compiled = torch.compile(model)

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            loss = compiled(ids, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(WARM):
        step()
    torch.cuda.synchronize()
    start = time.time()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    print(batch * length * STEPS / (time.time() - start))


if __name__ == "__main__":
    main()
