"""What torch itself brings around FSDP2: state dicts, pipelines, inductor, the memory tracker.

Checkpoints that pass between stock and the plugin are in test_checkpoints.
"""

import contextlib
import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dsd
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import DTensor

from ecosystem.training import record_parameters, scenario, train
from support import models, shards
from support.arms import PLAIN, Run, Scenario
from support.steps import loss_of, settle

PACKAGES = ()
IMPORTS = (
    "torch._inductor.compile_fx",
    "torch.distributed._tools.fsdp2_mem_tracker",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.pipelining",
)


def loss(run: Run, step: int) -> torch.Tensor:
    return loss_of(run.forward(run.batch(step)))


# - State dicts


def half_frozen() -> nn.Module:
    model = models.stack()
    model.blocks[0].requires_grad_(False)
    return model


def record_nested(run: Run, key: str, value) -> None:
    if isinstance(value, dict):
        for name, inner in value.items():
            record_nested(run, f"{key}/{name}", inner)
    elif isinstance(value, list):
        record_nested(run, key, dict(enumerate(value)))
    else:
        run.record(key, value)


def state_dicts(**options) -> Callable[[Run, int], None]:
    """Taken after a step and put back after the next, in model and optimizer."""

    def between(run: Run, step: int) -> None:
        wanted = dsd.StateDictOptions(**options)
        if step == 0:
            model, optimizer = dsd.get_state_dict(run.module, run.optimizer, options=wanted)
            record_nested(run, "state/model", model)
            record_nested(run, "state/optimizer", optimizer)
            run.kept["states"] = copy.deepcopy((model, optimizer))
        elif step == 1:
            model, optimizer = run.kept["states"]
            if wanted.broadcast_from_rank0 and not run.fsdp:
                wanted = dsd.StateDictOptions()  # between DTensors only
            elif wanted.broadcast_from_rank0 and run.rank:
                model, optimizer = {}, {}
            # One by one: set_state_dict takes an empty model state for "the optimizer alone".
            dsd.set_model_state_dict(run.module, model, options=wanted)
            dsd.set_optimizer_state_dict(run.module, run.optimizer, optimizer, options=wanted)
            record_parameters(run, "restored")

    return between


def partial_state(run: Run, step: int) -> None:
    """One block alone goes out and back, with and without its prefix."""
    for prefixes in (True, False):
        options = dsd.StateDictOptions(keep_submodule_prefixes=prefixes, strict=False)
        block = run.module.blocks[1]
        state = dsd.get_model_state_dict(run.module, submodules={block}, options=options)
        record_nested(run, f"{step}/{prefixes}", state)
        target = run.module if prefixes else block
        dsd.set_model_state_dict(target, state, options=options)


def async_save(run: Run, step: int) -> None:
    """Training goes on while the checkpoint is written; it holds the values of its moment."""
    if saving := run.kept.pop("saving", None):
        saving.result()
        state = {"model": dsd.get_model_state_dict(run.module)}
        state = {"model": {k: torch.zeros_like(v) for k, v in state["model"].items()}}
        dcp.load(state, checkpoint_id=str(run.directory / f"step-{step - 1}"))
        record_nested(run, f"saved {step - 1}", state)
    if step == 0:
        # A thread works in it, while training uses the default one.
        run.kept["group"] = dist.new_group(backend="gloo")
    state = {"model": dsd.get_model_state_dict(run.module)}
    run.kept["saving"] = dcp.async_save(
        state,
        checkpoint_id=str(run.directory / f"step-{step}"),
        process_group=run.kept["group"],
    )
    if step == 2:
        run.kept.pop("saving").result()


def meta() -> nn.Module:
    with torch.device("meta"):
        return models.stack()


def materialize(run: Run) -> None:
    if run.fsdp:
        shards.blocks(*run.kept.get("mesh", (1,)))(run)
    run.module.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(5)
    full = {
        name: torch.randn(value.shape, generator=generator)
        for name, value in models.stack().state_dict().items()
    }
    options = dsd.StateDictOptions(full_state_dict=True)
    dsd.set_model_state_dict(run.module, full, options=options)


# - Pipelines


class Stage(nn.Sequential):
    """Two blocks, each sharded on its own, in a root of their own."""

    def __init__(self) -> None:
        super().__init__(models.Block(), models.Block())


def pipeline(schedule: str, per_rank: int = 1, **sharding) -> Callable[[Run], None]:
    """Two pipeline ranks, and data parallelism of one: each rank's stages shard alone."""

    def steps(run: Run) -> None:
        mesh = run.mesh(2, 1, names=("pp", "dp"))
        stages = nn.ModuleList(Stage() for _ in range(2 * per_rank))
        mine = {i: stages[i] for i in range(run.rank, 2 * per_rank, 2)}
        if run.fsdp:
            for stage in mine.values():
                run.fully_shard(*stage, stage, mesh=mesh["dp"], **sharding)
        run.module = nn.ModuleDict({str(i): stage for i, stage in mine.items()})
        run.optimizer = torch.optim.AdamW(run.module.parameters(), lr=0.01)
        parts = [
            pipelining.PipelineStage(
                stage, i, len(stages), torch.device("cpu"), group=mesh.get_group("pp")
            )
            for i, stage in mine.items()
        ]
        runner = getattr(pipelining, schedule)(
            parts if issubclass(getattr(pipelining, schedule), schedules.PipelineScheduleMulti)
            else parts[0],
            n_microbatches=4,
            loss_fn=lambda output, target: nn.functional.mse_loss(output, target),
        )  # fmt: skip
        for step in range(3):
            with run.count("step") if step == 1 else contextlib.nullcontext():
                batch, target = (run.batch(2 * step + i, 8, models.DIM) for i in range(2))
                losses: list[torch.Tensor] = []
                if run.rank == 0 and per_rank * 2 - 1 not in mine:
                    runner.step(batch)
                elif 0 in mine:
                    runner.step(batch, target=target, losses=losses)
                else:
                    runner.step(target=target, losses=losses)
            run.record_all(f"{step}/loss", dict(enumerate(losses)))
            run.record_gradients(str(step))
            run.optimizer.step()
            run.optimizer.zero_grad()
        record_parameters(run, "end")

    return steps


# - Inductor and the memory tracker


def compile_blocks(run: Run) -> None:
    for block in run.module.blocks:
        block.compile(backend="inductor", fullgraph=False)


def compiled_and_sharded(run: Run) -> None:
    compile_blocks(run)
    shards.blocks(1)(run)


def tracked(run: Run) -> None:
    run.optimizer = torch.optim.AdamW(run.module.parameters(), lr=0.01)
    for step in range(3):
        tracker = contextlib.nullcontext()
        if run.fsdp and step == 1:
            from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

            tracker = FSDPMemTracker(run.module, run.optimizer)
        with tracker:
            value = loss(run, step)
            value.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
        run.record(f"{step}/loss", value)
    with run.count("step"):
        loss(run, 3).backward()
    record_parameters(run, "end")


def _scenario(name: str, steps=None, *mesh: int, **kwargs) -> Scenario:
    if mesh:
        kwargs |= {"world": mesh[0], "replicas": mesh[0]}
    kwargs.setdefault("shard", shards.blocks(*(mesh or (1,))))
    return scenario("torch", name, steps=steps, **kwargs)


def _options(name: str, *mesh: int, **options) -> Scenario:
    steps = train(loss, between=state_dicts(**options))
    return _scenario(f"state dict, {name}", steps, *mesh, model=half_frozen)


def _pipeline(name: str, *args, **kwargs) -> Scenario:
    return _scenario(f"pipeline, {name}", pipeline(*args, **kwargs), world=2, shard=None)


SCENARIOS = [
    _options("sharded"),
    _options("sharded, (2, 1) mesh", 2, 1),
    _options("full", full_state_dict=True),
    _options("full, on the CPU", full_state_dict=True, cpu_offload=True),
    _options("without frozen parameters", ignore_frozen_params=True, strict=False),
    _options("flat optimizer", flatten_optimizer_state_dict=True),
    _options("broadcast from rank 0, (2, 1) mesh", 2, 1, full_state_dict=True,
             broadcast_from_rank0=True),
    _scenario("state dict, one block", train(loss, between=partial_state)),
    _scenario("async save", train(loss, between=async_save)),
    _scenario("async save, (2, 1) mesh", train(loss, between=async_save), 2, 1),
    _scenario("meta init", train(loss), model=meta, prepare=materialize, shard=None),
    _pipeline("GPipe", "ScheduleGPipe"),
    _pipeline("1F1B", "Schedule1F1B"),
    _pipeline("1F1B, kept after forward", "Schedule1F1B", reshard_after_forward=False),
    _pipeline("interleaved 1F1B", "ScheduleInterleaved1F1B", 2),
    _pipeline("looped BFS", "ScheduleLoopedBFS", 2),
    _pipeline("zero bubble, kept after forward", "ScheduleInterleavedZeroBubble", 2,
              reshard_after_forward=False),
    _scenario("inductor, each block", train(loss), shard=compiled_and_sharded,
              plain=compile_blocks),
    _scenario("FSDPMemTracker", tracked),
]  # fmt: skip
