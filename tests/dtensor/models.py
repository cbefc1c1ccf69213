"""A plain torch decoder with what the planner must know: grouped queries, tied embeddings, biases, norms, experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Shape:
    """Sizes and options of a `Decoder`."""

    vocabulary: int = 64
    width: int = 32
    heads: int = 4
    key_heads: int = 4
    layers: int = 2
    sequence: int = 8
    bias: bool = True
    tied: bool = False
    head_norms: bool = False
    experts: int = 0
    fused: bool = False


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.width // shape.heads
        self.n_heads, self.n_kv_heads = shape.heads, shape.key_heads
        self.wq = nn.Linear(shape.width, shape.heads * self.head_dim, bias=shape.bias)
        self.wk = nn.Linear(shape.width, shape.key_heads * self.head_dim, bias=shape.bias)
        self.wv = nn.Linear(shape.width, shape.key_heads * self.head_dim, bias=shape.bias)
        self.wo = nn.Linear(shape.heads * self.head_dim, shape.width, bias=shape.bias)
        self.q_norm = nn.RMSNorm(self.head_dim) if shape.head_norms else nn.Identity()
        self.k_norm = nn.RMSNorm(self.head_dim) if shape.head_norms else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q = self.q_norm(self.wq(x).view(b, t, self.n_heads, self.head_dim)).transpose(1, 2)
        k = self.k_norm(self.wk(x).view(b, t, self.n_kv_heads, self.head_dim)).transpose(1, 2)
        v = self.wv(x).view(b, t, self.n_kv_heads, self.head_dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.n_heads != self.n_kv_heads)
        return self.wo(out.transpose(1, 2).flatten(2))


class FusedAttention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.n_heads, self.head_dim = shape.heads, shape.width // shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=shape.bias)
        self.proj = nn.Linear(shape.width, shape.width, bias=shape.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, self.n_heads, self.head_dim).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        return self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        if shape.fused:
            self.gate_up_proj = nn.Linear(shape.width, 4 * shape.width, bias=shape.bias)
        else:
            self.w1 = nn.Linear(shape.width, 2 * shape.width, bias=shape.bias)
            self.w3 = nn.Linear(shape.width, 2 * shape.width, bias=shape.bias)
        self.w2 = nn.Linear(2 * shape.width, shape.width, bias=shape.bias)
        self.fused = shape.fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1) if self.fused else (self.w1(x), self.w3(x))
        return self.w2(F.silu(gate) * up)


class Experts(nn.Module):
    """Stacked weights of shape (experts, out, in)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(shape.experts, 4 * shape.width, shape.width) * 0.2)
        self.down_proj = nn.Parameter(torch.randn(shape.experts, shape.width, 2 * shape.width) * 0.2)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for index in range(self.gate_up_proj.shape[0]):
            tokens, slots = torch.where(chosen == index)
            gate, up = F.linear(x[tokens], self.gate_up_proj[index]).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, self.down_proj[index])
            out = out.index_add(0, tokens, y * weights[tokens, slots].unsqueeze(-1))
        return out


class Mixture(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.router = nn.Linear(shape.width, shape.experts, bias=False)
        self.experts = Experts(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2, dim=-1)
        return self.experts(tokens, chosen, weights).view_as(x)


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.attention = FusedAttention(shape) if shape.fused else Attention(shape)
        self.mlp: nn.Module = Mixture(shape) if shape.experts else MLP(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """Tokens (batch, sequence) -> logits (batch, sequence, vocabulary)."""

    def __init__(self, shape: Shape = Shape()) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.sequence, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.output = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.tied:
            self.output.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        x = x + self.positions(torch.arange(x.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def make_decoder(shape: Shape = Shape(), *, seed: int = 0) -> Decoder:
    """A decoder with norms and biases that are not at the values at which they do nothing."""
    torch.manual_seed(seed)
    model = Decoder(shape)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def make_batch(shape: Shape = Shape(), *, rows: int = 4, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets; two targets of each row do not count."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(shape.vocabulary, (rows, shape.sequence + 1), generator=generator)
    targets = ids[:, 1:].clone()
    targets[:, :2] = -100
    return ids[:, :-1], targets
