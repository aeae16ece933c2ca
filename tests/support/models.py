"""Small modules of the shapes that FSDP2 meets: odd sizes, ties, norms, branches."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

DIM = 8
VOCAB = 23


class Block(nn.Module):
    """Norm and MLP with a residual; hidden sizes that divide by nothing in particular."""

    def __init__(self, dim: int = DIM, hidden: int = 12, dropout: float = 0.0):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim, bias=False)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    """Blocks and a head: ``fully_shard`` on each block, then on the root."""

    def __init__(self, depth: int = 2, dim: int = DIM, hidden: int = 12, out: int = 5, **block):
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim, hidden, **block) for _ in range(depth))
        self.head = nn.Linear(dim, out)
        self.register_buffer("scale", torch.full((out,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale.to(x.dtype)


class Tied(nn.Module):
    """An embedding whose weight is also the output projection's."""

    def __init__(self, dim: int = DIM):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList([Block(dim)])
        self.out = nn.Linear(dim, VOCAB, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Shared(nn.Module):
    """One block used at two places, and under two names."""

    def __init__(self):
        super().__init__()
        self.first = Block()
        self.second = self.first
        self.head = nn.Linear(DIM, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x)))


class Branches(nn.Module):
    """Experts of which a step uses only some: the others get no gradient."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(Block() for _ in range(3))
        self.unused = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(DIM, 5)
        self.active: tuple[int, ...] = (0,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.active:
            x = self.experts[index](x)
        return self.head(x)


class Nested(nn.Module):
    """FSDP2 inside FSDP2 inside FSDP2, and a root without parameters of its own."""

    def __init__(self):
        super().__init__()
        self.left = Stack(depth=1, out=DIM)
        self.right = Stack(depth=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.right(torch.tanh(self.left(x)))


class Attention(nn.Module):
    def __init__(self, dim: int = DIM, heads: int = 2):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(-3, -2)
            for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(-3, -2).flatten(-2))


class Transformer(nn.Module):
    def __init__(self, depth: int = 2, dim: int = DIM, dropout: float = 0.0):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(
            nn.Sequential(Attention(dim), Block(dim, dropout=dropout)) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Resettable(nn.Module):
    """Made on the meta device; its own ``reset_parameters`` gives it values."""

    def __init__(self, dim: int = DIM):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, dim))
        self.bias = nn.Parameter(torch.empty(dim))
        self.register_buffer("shift", torch.empty(dim))
        if not self.weight.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.3)
        nn.init.ones_(self.bias)
        nn.init.constant_(self.shift, 0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(F.linear(x, self.weight, self.bias) + self.shift)


def stack(**kwargs) -> Stack:
    return Stack(**kwargs)


def stack_of(**kwargs) -> Callable[[], Stack]:
    return lambda: Stack(**kwargs)


def linears(depth: int = 3, dim: int = DIM) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(dim, dim) for _ in range(depth)))
