"""One leg of a relay of checkpoints: ``relay FROM TO RESULT LEG``, in a process of its own.

Two ranks load what the leg before saved, under each layout that it was saved under and into each
layout there is, take one step and save. Whether the plugin is on is for the environment to say.
"""

import functools
import os
import pickle
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dsd
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from support import models, warmup
from support.arms import Image, average_gradients, seed_everything
from support.ranks import Rank, run_ranks
from support.steps import loss_of

LAYOUTS = ("plain", "(2, 1)", "(1, 2)")


def build(layout: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    seed_everything()
    model = models.stack()
    if layout != "plain":
        shape = (2, 1) if layout == "(2, 1)" else (1, 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


@functools.cache
def summed_over(layout: str) -> int:
    """How many ranks FSDP2 sums over instead of averaging: on gloo, up to 2.9, those of a shard."""
    if layout != "(1, 2)":
        return 1
    probe = fully_shard(nn.Linear(1, 2, bias=False), mesh=init_device_mesh("cpu", (2,)))
    probe(torch.ones(1, 1)).sum().backward()
    return int(probe.weight.grad.to_local().sum())


def step(model, optimizer, layout: str, rank: int, leg: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * leg + rank)
    loss = loss_of(model(torch.randn(4, models.DIM, generator=generator)))
    (loss / summed_over(layout)).backward()
    if layout == "plain":
        average_gradients(model, 2)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def states(model, optimizer) -> dict:
    model_state, optimizer_state = dsd.get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def everything(model, optimizer) -> dict[str, Image]:
    full = dsd.StateDictOptions(full_state_dict=True)
    found = {f"model/{k}": v for k, v in dsd.get_model_state_dict(model, options=full).items()}
    held = dsd.get_optimizer_state_dict(model, optimizer, options=full)
    for parameter, state in held["state"].items():
        found |= {f"optimizer/{parameter}/{key}": value for key, value in state.items()}
    return {key: Image.of(value) for key, value in found.items()}


def run_leg(rank: Rank, source: str, target: str, leg: int) -> dict[str, dict[str, Image]]:
    results = {}
    for saved_under in LAYOUTS if leg else ("nothing",):
        for layout in LAYOUTS:
            model, optimizer = build(layout)
            if leg:
                state = states(model, optimizer)
                dcp.load(state, checkpoint_id=str(Path(source) / saved_under))
                dsd.set_state_dict(
                    model,
                    optimizer,
                    model_state_dict=state["model"],
                    optim_state_dict=state["optimizer"],
                )
            found = {"loss": Image.of(step(model, optimizer, layout, rank.rank, leg))}
            results[f"{saved_under} to {layout}"] = found | everything(model, optimizer)
            if saved_under in ("nothing", layout):
                dcp.save(states(model, optimizer), checkpoint_id=str(Path(target) / layout))
    plugin = sys.modules.get("fsdp_skip1")
    skipped = plugin.stats().all_gathers if plugin else None
    assert (skipped is None) == ("FSDP_SKIP1" not in os.environ)
    assert skipped is None or skipped > 0
    return results


def main(source: str, target: str, result: str, leg: int) -> None:
    warnings.simplefilter("ignore")
    warmup.load()
    found = run_ranks(lambda rank: run_leg(rank, source, target, leg), 2, 300.0)
    Path(result).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]))
