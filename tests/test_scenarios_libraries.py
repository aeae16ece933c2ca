"""What trainers were seen to do (``tests/ecosystem``), without the trainers."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from support import models, shards
from support.arms import Run, Scenario
from support.results import arm_tests
from support.steps import backward, forward, loss_of, sgd, train, update

pytestmark = pytest.mark.scenario


class CrossStack(nn.Module):
    """Every block also gets what the first gave out, as a decoder's get the encoder's output."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Beside() for _ in range(3))
        self.head = nn.Linear(models.DIM, 5)

    def forward(self, x):
        first = x = self.blocks[0](x, x)
        for block in self.blocks[1:]:
            x = block(x, first)
        return self.head(x)


class Beside(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = models.Block()
        self.side = nn.Linear(models.DIM, models.DIM)

    def forward(self, x, other):
        return self.block(x) + self.side(other)


def part_by_itself(run: Run) -> None:
    """transformers' ``generate()`` on T5: a part of the root is called past the root's hooks."""
    run.optimizer = sgd(run.module.parameters())
    for step in range(3):
        backward(run, forward(run, f"step {step}", run.batch(step)))
        update(run, f"step {step}")
        run.module.eval()
        if run.fsdp:
            run.module.unshard()
        with torch.no_grad():
            run.record(f"step {step}/part", run.module.head(run.batch(9)))
            run.record(f"step {step}/block", run.module.blocks[0](run.batch(9)))
        if run.fsdp:
            run.module.reshard()
        run.module.train()


def merged_in_place(run: Run) -> None:
    """peft merges an adapter by adding to ``.data``, and takes it away again."""
    run.optimizer = sgd(run.module.parameters())
    for step in range(3):
        backward(run, forward(run, f"step {step}", run.batch(step)))
        update(run, f"step {step}")
        for sign in (1, -1):
            for parameter in run.module.parameters():
                parameter.data.add_(torch.full_like(parameter.data, 0.25), alpha=sign)
            with torch.no_grad():
                run.record(f"step {step}/{sign}", run.forward(run.batch(9)))
            if run.fsdp:
                run.module.reshard()  # else the root's parameters are still the unsharded ones


def assigned_data(run: Run) -> None:
    """peft's DoRA assigns to ``.data`` of a sharded parameter, which stock FSDP2 does not notice."""
    run.optimizer = sgd(run.module.parameters())
    for step in range(3):
        backward(run, forward(run, f"step {step}", run.batch(step)))
        update(run, f"step {step}")
        for parameter in run.module.parameters():
            parameter.data = parameter.data * 0.5
        with torch.no_grad():
            run.record(f"step {step}/assigned", run.forward(run.batch(9)))
        run.record_parameters(f"step {step}/assigned")


def gathered_in_forward(run: Run) -> None:
    """trl's loss asks a sharded weight for its full tensor, within the root's forward."""

    def full(module, args, output):
        weight = run.module.blocks[0].up.weight
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        return output + whole.detach().sum()

    run.module.blocks[1].register_forward_hook(full)
    train()(run)


def sync_left_off(run: Run) -> None:
    """lightning's Fabric can leave reduction off for whole backward passes, then on again."""
    run.optimizer = sgd(run.module.parameters())
    for step in range(3):
        for micro in range(3):
            if run.fsdp:
                run.module.set_requires_gradient_sync(micro == 2)
            loss = loss_of(run.forward(run.batch(3 * step + micro)))
            run.record(f"step {step}.{micro}/loss", loss)
            backward(run, loss, sync=micro == 2)
            if micro == 0:  # evaluation before the gradients are reduced
                with torch.no_grad():
                    run.record(f"step {step}/eval", run.forward(run.batch(9)))
        update(run, f"step {step}")


SCENARIOS = [
    Scenario(name="one tensor for several blocks", model=CrossStack, shard=shards.blocks(1),
             like_plain=False, steps=train()),
    Scenario(name="a part by itself", shard=shards.blocks(1), steps=part_by_itself),
    Scenario(name="merged in place", shard=shards.blocks(1), steps=merged_in_place),
    Scenario(name="data assigned", shard=shards.blocks(1), like_plain=False, steps=assigned_data),
    Scenario(name="gathered in forward", shard=shards.blocks(1), size_one=None,
             steps=gathered_in_forward, comm_mode=False),
    Scenario(name="sync left off", shard=shards.blocks(1), steps=sync_left_off),
    Scenario(name="sync left off, hsdp", shard=shards.blocks(2, 1), world=2, replicas=2,
             steps=sync_left_off),
]  # fmt: skip


@arm_tests(SCENARIOS)
def test_scenario(scenario: Scenario, arm: str, ledger) -> None:
    ledger.judge(scenario, arm)
