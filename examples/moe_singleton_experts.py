"""Expert parallelism: each expert lives on one rank, so FSDP2 wraps it on a mesh of one.

    torchrun --nproc-per-node=2 examples/moe_singleton_experts.py

Attention, norms and routers shard over all ranks. An expert that has a rank to itself is wrapped
all the same, for FSDP2's mixed precision, clipping and checkpoints; its shard mesh has size 1.
Needs torch 2.8 or later, for `set_gradient_divide_factor`.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import fsdp_skip1

DIM = 32


class Gather(torch.autograd.Function):
    """Every rank gets the rows of all ranks; backward sums what all ranks say about ours."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ranks: DeviceMesh) -> Tensor:
        ctx.ranks = ranks
        parts = [torch.empty_like(rows) for _ in range(ranks.size())]
        dist.all_gather(parts, rows.contiguous(), group=ranks.get_group())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone()
        dist.all_reduce(total, group=ctx.ranks.get_group())
        return total.chunk(ctx.ranks.size())[ctx.ranks.get_local_rank()], None


class Combine(torch.autograd.Function):
    """The other way round: sum over ranks, keep our rows; backward gathers."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ranks: DeviceMesh) -> Tensor:
        ctx.ranks = ranks
        return Gather.backward(ctx, rows)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return Gather.forward(ctx, grad, ctx.ranks), None


class Experts(nn.Module):
    """One expert on every rank. Tokens visit all ranks; each expert answers for those it got."""

    def __init__(self, ranks: DeviceMesh) -> None:
        super().__init__()
        self.ranks = ranks
        self.router = nn.Linear(DIM, ranks.size(), bias=False)
        self.expert = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.router(x).softmax(-1).max(-1)
        experts = torch.arange(self.ranks.size())
        gates = weight.unsqueeze(1) * (choice.unsqueeze(1) == experts)
        tokens = cast(Tensor, Gather.apply(x, self.ranks))
        mine = Gather.apply(gates, self.ranks)[:, self.ranks.get_local_rank(), None]
        return x + cast(Tensor, Combine.apply(mine * self.expert(tokens), self.ranks))


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("ranks", "expert_shard"))
    ranks, singleton = mesh["ranks"], mesh["expert_shard"]

    torch.manual_seed(0)  # the same routers on every rank
    model = nn.Sequential(*(Experts(ranks) for _ in range(2)), nn.Linear(DIM, DIM))
    torch.manual_seed(1 + rank)  # other experts and other data on every rank
    for layer in model:
        if isinstance(layer, Experts):
            for linear in layer.expert:
                if isinstance(linear, nn.Linear):
                    linear.reset_parameters()
            expert = fully_shard(layer.expert, mesh=singleton)
            assert isinstance(expert, FSDPModule)
            # An expert sees the tokens of all ranks, each with the gradient of its own rank's mean.
            expert.set_gradient_divide_factor(float(world))
        fully_shard(layer, mesh=ranks)
    fully_shard(model, mesh=ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    inputs = torch.randn(64, DIM)
    if rank == 0:
        print("fsdp_skip1 is", "on" if fsdp_skip1.is_enabled() else "off")
    for step in range(1, 6):
        loss = (model(inputs) - inputs.sin()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())  # for the report only
        if rank == 0:
            print(f"step {step}  loss {loss.item() / world:.6f}")
    dist.barrier()  # a rank that leaves early can abort those that are still talking to it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
