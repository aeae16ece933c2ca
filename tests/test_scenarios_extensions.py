"""Tensor subclasses with all-gather hooks, on every release and both hook signatures."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from support import shards
from support.arms import Run, Scenario
from support.extensions import (
    HalfGathered,
    HighAndLow,
    OneTensorNew,
    OneTensorOld,
    Quantized,
    SeenAs,
    Weight,
)
from support.results import arm_tests
from support.steps import backward, forward, sgd, train, update

pytestmark = pytest.mark.scenario


def coated(kind: type[Weight]):
    """The weights of all linear layers become ``kind`` in the FSDP2 arms."""

    def prepare(run: Run) -> None:
        if not run.fsdp:
            return
        for layer in run.module.modules():
            if isinstance(layer, nn.Linear):
                layer.weight = nn.Parameter(kind(layer.weight.data))

    return prepare


def shown(kind: type[Weight]):
    """The plain arm: the same module over what the extension makes of its weights."""

    def plain(run: Run) -> None:
        if not hasattr(kind, "as_seen"):
            return
        linear = {f"{n}.weight" for n, m in run.module.named_modules() if isinstance(m, nn.Linear)}

        def call(x: torch.Tensor) -> torch.Tensor:
            weights = {
                name: SeenAs.apply(p, kind.as_seen) if name in linear else p
                for name, p in run.module.named_parameters()
            }
            return torch.func.functional_call(run.module, weights, (x,))

        run.forward = call

    return plain


def one_by_one(parameters):
    """In-place operators on lists of subclasses are not what is tested here."""
    return sgd(parameters, foreach=False)


def unshard_repeatedly(run: Run) -> None:
    run.optimizer = one_by_one(run.module.parameters())
    for step in range(3):
        if run.fsdp:
            for block in run.module.blocks:
                for _ in range(2):
                    block.unshard()
                    block.reshard()
        with torch.no_grad():
            run.record(f"step {step}/eval", run.forward(run.batch(9)))
        backward(run, forward(run, f"step {step}", run.batch(step)))
        update(run, f"step {step}")


def extension(kind: type[Weight], name: str = "", *mesh: int, **kwargs) -> Scenario:
    options = {
        "name": f"{kind.__name__}{name}",
        "prepare": coated(kind),
        "plain": shown(kind),
        "shard": shards.blocks(*(mesh or (1,))),
        "steps": train(optimizer=one_by_one),
        **kwargs,
    }
    return Scenario(**options)


ONE = (OneTensorOld, OneTensorNew, HalfGathered)
SEVERAL = (HighAndLow, Quantized)
FAULT = "extension with several tensors"

SCENARIOS = [
    *(extension(kind) for kind in ONE),
    *(
        extension(kind, ", kept after forward",
                  shard=shards.blocks(1, reshard_after_forward=False))
        for kind in ONE
    ),
    *(extension(kind, ", unsharded repeatedly", steps=unshard_repeatedly) for kind in ONE),
    extension(OneTensorNew, ", hsdp", 2, 1, world=2, replicas=2),
    extension(OneTensorNew, ", hsdp accumulation", 2, 1, world=2, replicas=2,
              steps=train(micro=2, optimizer=one_by_one)),
    extension(OneTensorOld, ", offload",
              shard=shards.blocks(1, offload_policy=CPUOffloadPolicy(pin_memory=False))),
    extension(HalfGathered, ", reduce bf16", like_plain=False,
              shard=shards.blocks(1, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))),
    *(extension(kind, fault=FAULT) for kind in SEVERAL),
    *(
        extension(kind, ", kept after forward", fault=FAULT,
                  shard=shards.blocks(1, reshard_after_forward=False))
        for kind in SEVERAL
    ),
    *(
        extension(kind, ", unsharded repeatedly", fault=FAULT, steps=unshard_repeatedly)
        for kind in SEVERAL
    ),
    extension(Quantized, ", hsdp", 2, 1, world=2, replicas=2, fault=FAULT),
]  # fmt: skip


@arm_tests(SCENARIOS)
def test_scenario(scenario: Scenario, arm: str, ledger) -> None:
    ledger.judge(scenario, arm)
