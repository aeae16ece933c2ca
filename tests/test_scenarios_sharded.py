"""Parameters that are really sharded: the plugin is on and changes nothing.

Values, layouts, operators and collectives are those of stock torch, one for one.
"""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from support import models, shards
from support.arms import Run, Scenario
from support.results import arm_tests
from support.steps import backward, forward, sgd, tokens, train, update

pytestmark = pytest.mark.scenario

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def sharded(what: str, *mesh: int, **kwargs) -> Scenario:
    world = 1
    for size in mesh:
        world *= size
    options = {
        "name": f"sharded {mesh}{what}",
        "shard": shards.blocks(*mesh),
        "steps": train(),
        "world": world,
        "like_plain": False,
        "size_one": False,
        **kwargs,
    }
    return Scenario(**options)


def tensor_parallel(run: Run) -> None:
    mesh = run.mesh(2, 2, names=("dp", "tp"))
    for block in run.module.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def beside_tensor_parallel(run: Run) -> None:
    mesh = run.mesh(2, 2, names=("dp", "tp"))["dp"]
    for block in run.module.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(run.module, mesh=mesh)


def on_even_dim(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.ndim == 2 else None


def by_hand(run: Run) -> None:
    """Handles, prefetches left pending, accumulation and evaluation."""
    run.optimizer = sgd(run.module.parameters())
    for step in range(3):
        handles = [block.unshard(async_op=True) for block in run.module.blocks]
        handles[0].wait()
        with torch.no_grad():
            run.record(f"step {step}/eval", run.forward(run.batch(9)))
        for index in range(2):
            run.module.set_requires_gradient_sync(index == 1)
            with run.count("step"):
                loss = forward(run, f"step {step}.{index}", run.batch(2 * step + index))
                backward(run, loss)
        update(run, f"step {step}")


def prefetching(run: Run) -> None:
    shards.blocks(2)(run)
    first, second = run.module.blocks
    run.module.set_modules_to_forward_prefetch([first, second])
    second.set_modules_to_backward_prefetch([first])


SCENARIOS = [
    sharded("", 2),
    sharded(", transformer", 2, model=models.Transformer, steps=train(inputs=tokens)),
    sharded(", tied", 2, model=models.Tied, steps=train(inputs=tokens)),
    sharded(", bf16", 2, shard=shards.blocks(2, mp_policy=MIXED)),
    sharded(", kept after forward", 2, shard=shards.blocks(2, reshard_after_forward=False)),
    sharded(", by hand", 2, steps=by_hand),
    sharded(", prefetch", 2, shard=prefetching),
    sharded(", on dim 1", 2, shard=shards.blocks(2, shard_placement_fn=on_even_dim)),
    sharded(", offload", 2,
            shard=shards.blocks(2, offload_policy=CPUOffloadPolicy(pin_memory=False))),
    sharded("", 4),
    sharded(", to a world of 2 after forward", 4, shard=shards.blocks(4, reshard_after_forward=2)),
    sharded("", 2, 2),
    sharded(", accumulation", 2, 2, steps=train(micro=2)),
    sharded("", 1, 2, name="sharded (1, 2)"),
    sharded(", with tensor parallelism", 2, 2, prepare=tensor_parallel,
            shard=beside_tensor_parallel),
]  # fmt: skip


@arm_tests(SCENARIOS)
def test_scenario(scenario: Scenario, arm: str, ledger) -> None:
    ledger.judge(scenario, arm)


@pytest.mark.parametrize("name", [s.name for s in SCENARIOS])
def test_collectives_are_counted(name: str, ledger) -> None:
    """Were the counters blind, "nothing changed" would mean nothing."""
    scenario = next(s for s in SCENARIOS if s.name == name)
    for outcomes in ledger.outcomes(scenario):
        counts = outcomes["stock"].counts["step"]
        assert counts.all_gathers > 0
        assert counts.reduce_scatters > 0
        assert counts.fsdp_ops
