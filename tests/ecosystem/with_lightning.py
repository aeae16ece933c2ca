"""lightning: Fabric and Trainer with ``ModelParallelStrategy``, and their checkpoints."""

import contextlib

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from ecosystem.training import record_parameters, scenario
from support import models
from support.arms import Run, Scenario, seed_everything
from support.steps import loss_of

PACKAGES = ("lightning",)
IMPORTS = (
    "lightning",
    "lightning.fabric.strategies.model_parallel",
    "lightning.pytorch.strategies.model_parallel",
)


def shard(model: nn.Module, mesh) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


# One of each parallelism, as far as this strategy's set-up asks.
SIZES = {"data_parallel_size": 1, "tensor_parallel_size": 1}


def make_fabric(run: Run):
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    options = {}
    if run.fsdp:
        options["strategy"] = ModelParallelStrategy(parallelize_fn=shard, **SIZES)
    fabric = Fabric(accelerator="cpu", devices=1, **options)
    fabric.launch()
    return fabric


def fabric_steps(run: Run) -> None:
    fabric = make_fabric(run)
    model = fabric.setup(run.module)
    run.module = model.module
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))
    state = {"model": model, "optimizer": optimizer}
    for step in range(4):
        with run.count("step"):
            with fabric.no_backward_sync(model, enabled=step == 1):
                loss = loss_of(model(run.batch(step)))
                fabric.backward(loss)
        run.record(f"{step}/loss", loss)
        if step == 1:
            continue  # accumulates into the next
        run.record_gradients(str(step))
        norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)
        run.record(f"{step}/norm", float(norm))
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            fabric.save(run.directory / "checkpoint", state)
    record_parameters(run, "trained")
    fabric.load(run.directory / "checkpoint", state)
    record_parameters(run, "loaded")
    for index, held in enumerate(optimizer.state_dict()["state"].values()):
        run.record_all(f"loaded/optimizer/{index}", held)
    # Left alone, Fabric's FSDP2 modules would not reduce here: a no_backward_sync that was not
    # enabled leaves them so.
    with fabric.no_backward_sync(model, enabled=False):
        fabric.backward(loss_of(model(run.batch(9))))
    run.record_gradients("loaded")
    optimizer.step()
    record_parameters(run, "end")


def trainer_steps(run: Run) -> None:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy

    class Task(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            seed_everything()
            self.stack = models.stack()
            self.sharded = False

        def configure_model(self) -> None:
            if run.fsdp and not self.sharded:
                self.sharded = True
                shard(self.stack, self.device_mesh)

        def training_step(self, batch, index):
            loss = loss_of(self.stack(batch))
            run.record(f"{run.kept['fit']}, {self.global_step}, {index}/loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    def fit(steps: int, checkpoint=None):
        run.kept["fit"] = f"to {steps}"
        options = {"strategy": ModelParallelStrategy(**SIZES)} if run.fsdp else {}
        trainer = Trainer(
            accelerator="cpu", devices=1, max_steps=steps, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            accumulate_grad_batches=2, use_distributed_sampler=False,
            default_root_dir=run.directory, **options,
        )  # fmt: skip
        task = Task()
        data = torch.utils.data.DataLoader([run.batch(i) for i in range(8)], batch_size=None)
        # Loading a checkpoint gathers what it has found; that is no part of a step.
        with run.count("step") if checkpoint is None else contextlib.nullcontext():
            trainer.fit(task, data, ckpt_path=checkpoint)
        run.module = task.stack
        record_parameters(run, run.kept["fit"])
        return trainer

    trainer = fit(2)
    trainer.save_checkpoint(run.directory / "checkpoint")
    fit(4, run.directory / "checkpoint")


SCENARIOS: list[Scenario] = [
    scenario("lightning", "Fabric, ModelParallelStrategy", steps=fabric_steps),
    scenario("lightning", "Trainer, ModelParallelStrategy", steps=trainer_steps),
]
