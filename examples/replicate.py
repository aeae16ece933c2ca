"""`replicate()` over FSDP2's machinery: data parallelism that composes, torch 2.10 and later.

    torchrun --nproc-per-node=2 examples/replicate.py

A replicated module has no shard group at all; its gradients need one all-reduce and nothing more.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh

import fsdp_skip1


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("replicate",))
    torch.manual_seed(0)  # the same weights on every rank

    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
    for block in model:
        replicate(block, mesh=mesh)
    replicate(model, mesh=mesh)
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
