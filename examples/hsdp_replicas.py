"""FSDP2 as data parallelism: an (N, 1) mesh, every rank a full replica.

    torchrun --nproc-per-node=2 examples/hsdp_replicas.py

The shard dimension stays in the mesh, so that a larger model only needs other numbers there. While
it has size 1, a step should cost what DistributedDataParallel costs: one all-reduce a group.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fsdp_skip1


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)  # the same weights on every rank

    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    torch.manual_seed(1 + rank)  # other data on every rank
    inputs = torch.randn(32, 64)
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
