"""Train a small Llama with FSDP2 on the text of Python's own help topics.

    torchrun --nproc-per-node=1 examples/train.py
    torchrun --nproc-per-node=2 examples/train.py                 shards over both ranks
    torchrun --nproc-per-node=2 examples/train.py --replicate     (2, 1) mesh: replicas, no shards

Runs on CUDA where there is a GPU for every rank, on CPU with gloo elsewhere. Losses are printed
with every digit that they have, so that two runs can be compared to the bit.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

VOCABULARY = 256  # one token a byte


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
        return (x.float() * scale).type_as(x) * self.weight


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        half = dim // heads // 2
        frequencies = 10_000.0 ** -(torch.arange(half) / half)
        angles = torch.outer(torch.arange(length), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        """Rotary position embedding: turn each pair of channels by an angle of its position."""
        length = x.size(-2)
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        cos, sin = cast(Tensor, self.cos), cast(Tensor, self.sin)
        return (x * cos[:length] + turned * sin[:length]).type_as(x)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        return cast(Tensor, self.out(mixed.transpose(1, 2).reshape(batch, length, dim)))


class FeedForward(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        hidden = 8 * dim // 3
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down(F.silu(self.gate(x)) * self.up(x)))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, length: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(dim)
        self.attention = Attention(dim, heads, length)
        self.feed_forward_norm = RMSNorm(dim)
        self.feed_forward = FeedForward(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return cast(Tensor, x + self.feed_forward(self.feed_forward_norm(x)))


class Llama(nn.Module):
    def __init__(self, dim: int, layers: int, heads: int, length: int, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, length) for _ in range(layers))
        self.norm = RMSNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(self.norm(x)))


def read_text() -> Tensor:
    """The help topics as bytes; where a distribution left them out, the builtins' docstrings."""
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except (ImportError, AttributeError):
        builtins = vars(importlib.import_module("builtins"))
        topics = {name: value.__doc__ or "" for name, value in builtins.items()}
    text = "\n".join(topics[name] for name in sorted(topics))
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


class CountOps(TorchDispatchMode):
    """Counts the operators that run, under the names that torch gives them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # let DTensor call the operators on its local tensors
        self.counts[str(func._overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


# What FSDP2 runs before and after its collectives. Up to torch 2.8 these are operators of its own;
# later releases use plain copies on a shard mesh of one rank, and this model has no copies itself.
COPY_IN = ("fsdp.all_gather_copy_in", "fsdp.chunk_cat")
COPY_OUT = ("fsdp.split_with_sizes_copy", "aten.copy_", "aten._foreach_copy_")


def report(ops: CountOps) -> None:
    def count(*names: str) -> int:
        return sum(n for op, n in ops.counts.items() if op.startswith(names))

    kinds = {
        "all-gather": count("c10d._allgather", "c10d.allgather"),
        "reduce-scatter": count("c10d._reduce_scatter", "c10d.reduce_scatter"),
        "all-reduce": count("c10d.allreduce"),
        "copy-in": count(*COPY_IN),
        "copy-out": count(*COPY_OUT),
    }
    print("last step:", ", ".join(f"{n} {kind}" for kind, n in kinds.items()))


def train(args: argparse.Namespace) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    on_cuda = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
    if args.replicate:
        mesh = init_device_mesh(device.type, (world, 1), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))

    torch.manual_seed(0)  # the same weights on every rank
    model = Llama(args.dim, args.layers, args.heads, args.length, args.tied)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    text = read_text()
    generator = torch.Generator().manual_seed(1 + rank)  # different text on every rank
    for step in range(1, args.steps + 1):
        starts = torch.randint(len(text) - args.length, (args.batch,), generator=generator)
        rows = torch.stack([text[i : i + args.length + 1] for i in starts.tolist()])
        tokens = rows.to(device, torch.long)

        ops = CountOps()
        with ops if args.count and step == args.steps else nullcontext():
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

        mean = loss.detach().clone()
        if world > 1:
            dist.all_reduce(mean)
            mean /= world
        if rank == 0:
            print(f"step {step:2}  loss {mean.item()!r}", flush=True)
            if ops.counts:
                report(ops)
    if rank == 0:
        ranks = "1 rank" if world == 1 else f"{world} ranks"
        print(f"done: {args.steps} steps on {ranks}, {device.type}, torch {torch.__version__}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--dim", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--length", type=int, default=128, help="bytes in a sequence")
    parser.add_argument("--batch", type=int, default=4, help="sequences a rank")
    parser.add_argument("--tied", action="store_true", help="share the embedding with the head")
    parser.add_argument("--replicate", action="store_true", help="an (N, 1) mesh: replicas only")
    parser.add_argument("--count", action="store_true", help="count the last step's collectives")
    args = parser.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    on_cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    if on_cuda:
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if on_cuda else "gloo")
    try:
        train(args)
        dist.barrier()  # a rank that leaves early can abort those that are still talking to it
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
