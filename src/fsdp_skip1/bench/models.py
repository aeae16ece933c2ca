"""The models: a small Llama as it was published, and a residual MLP.

Their blocks are what gets wrapped, in `model.blocks`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from fsdp_skip1.bench.data import VOCABULARY

if TYPE_CHECKING:
    from torch import Tensor


class RMSNorm(nn.Module):
    """In float32 whatever comes in, as Llama has it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Scale to a root mean square of 1."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return wide.type_as(x) * self.weight


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, dim: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        half = dim // heads // 2
        angles = torch.outer(torch.arange(length), 10_000.0 ** -(torch.arange(half) / half))
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Mix each position with those before it."""
        batch, length, dim = x.shape
        shape = batch, length, self.heads, dim // self.heads
        query = self._rotate(self.query(x).view(shape).transpose(1, 2))
        key = self._rotate(self.key(x).view(shape).transpose(1, 2))
        value = self.value(x).view(shape).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, dim))

    def _rotate(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return (x * self.cos + turned * self.sin).type_as(x)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        hidden = 32 * round(dim / 12)  # 8 / 3 of dim, in multiples of 32
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Each position on its own."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class LlamaBlock(nn.Module):
    """Attention and feed-forward, each with a norm before it and a residual around it."""

    def __init__(self, dim: int, heads: int, length: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(dim)
        self.attention = Attention(dim, heads, length)
        self.feed_forward_norm = RMSNorm(dim)
        self.feed_forward = FeedForward(dim)

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class MLPBlock(nn.Module):
    """Two linear layers with a residual around them."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        return x + self.down(F.gelu(self.up(x)))


class ByteModel(nn.Module):
    """Bytes in, logits for the next byte out; what happens between is up to the blocks."""

    def __init__(self, dim: int, layers: int, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.norm = RMSNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits for each token."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Size:
    """How large a model is, and how much it is given in a step."""

    dim: int
    layers: int
    length: int
    heads: int = 0
    batch: int = 2

    def build(self) -> ByteModel:
        """Make the model, with the same weights every time."""
        torch.manual_seed(0)
        if not self.heads:
            return ByteModel(self.dim, self.layers, lambda: MLPBlock(self.dim))
        return ByteModel(
            self.dim, self.layers, lambda: LlamaBlock(self.dim, self.heads, self.length)
        )


SIZES = {
    "mlp": Size(dim=512, layers=4, length=64),
    "llama-768": Size(dim=768, layers=4, length=128, heads=12),
    "llama-512": Size(dim=512, layers=4, length=64, heads=8),
    "llama-256": Size(dim=256, layers=4, length=64, heads=4),
    "llama-64": Size(dim=64, layers=16, length=8, heads=4),
}
"""By the names in options.MODELS. llama-64 computes so little that only launches count."""
