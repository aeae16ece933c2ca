"""One GPU (or one CPU): the FSDP2 script of a large job, at the price of the plain module.

    torchrun --nproc-per-node=1 examples/single_gpu.py

The same file trains on 1 and on 1024 ranks: mixed precision and checkpoints in the sharded format
are FSDP2's, and on one rank there is nothing to gather and nothing to scatter.
"""

from __future__ import annotations

import fsdp_skip1  # isort: skip  (before or after torch, both work)
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("shard",))
    torch.manual_seed(0)

    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model:
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    inputs = torch.randn(32, 64, device=device)
    print("fsdp_skip1 is", "on" if fsdp_skip1.is_enabled() else "off")
    for step in range(1, 6):
        loss = (model(inputs).float() - inputs.sin()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}  loss {loss.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
