"""What a shard mesh of size 1 costs, in operators beyond those of the plain module.

Counted, not timed: a step's data-moving operators (no views, no allocations, no profiler ranges)
against the same step of a module without FSDP2.
"""

import sys
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from support import models, shards
from support.arms import PLUGIN, STOCK, Run, Scenario
from support.counting import Counts, counting
from support.features import missing
from support.ranks import run_ranks
from support.results import Ledger
from support.steps import backward, forward, sgd, tokens, train, update

pytestmark = pytest.mark.scenario

BF16 = torch.bfloat16
MIXED = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)


def counts_of(ledger: Ledger, scenario: Scenario, arm: str, key: str = "step") -> Counts:
    outcome = ledger.outcomes(scenario)[0][arm]
    assert not outcome.error, outcome.error
    return outcome.counts[key]


def settled(run: Run) -> None:
    """Counts the third step: what happens once is over by then."""
    train(3, counted=2, optimizer=sgd)(run)


def frozen(run: Run) -> None:
    run.module.blocks[0].requires_grad_(False)


def bf16_steps(run: Run) -> None:
    train(3, counted=2, optimizer=sgd, inputs=lambda run, i: run.batch(i).to(BF16))(run)


def accumulating(run: Run) -> None:
    train(2, micro=3, counted=1, optimizer=sgd)(run)


def accumulating_in_place(run: Run) -> None:
    """Gradients synchronized each time add up in the sharded ones: one addition a parameter.

    The plain module adds up too, in autograd.
    """
    run.optimizer = sgd(run.module.parameters())
    for index in range(3):
        if index == 2:
            with run.count("step"):
                backward(run, forward(run, f"{index}", run.batch(index)))
        else:
            backward(run, forward(run, f"{index}", run.batch(index)))
    update(run, "all")


def evaluating(run: Run) -> None:
    train(2, counted=None)(run)
    with torch.no_grad(), run.count("step"):
        run.record("eval", run.forward(run.batch(9)))


UNIFORM = [
    Scenario(name="fp32", shard=shards.blocks(1), steps=settled),
    Scenario(name="bf16", model=lambda: models.Stack().to(BF16), shard=shards.blocks(1),
             steps=bf16_steps),
    Scenario(name="fp32, kept after forward", steps=settled,
             shard=shards.blocks(1, reshard_after_forward=False)),
    Scenario(name="transformer", model=models.Transformer, shard=shards.blocks(1),
             steps=train(3, counted=2, inputs=tokens)),
    Scenario(name="tied", model=models.Tied, shard=shards.blocks(1),
             steps=train(3, counted=2, inputs=tokens)),
    Scenario(name="frozen block", prepare=frozen, shard=shards.blocks(1), steps=settled),
    Scenario(name="(1, 1)", shard=shards.blocks(1, 1), steps=settled),
    Scenario(name="no sync but the last", shard=shards.blocks(1), steps=accumulating),
    Scenario(name="sharded gradients add up", shard=shards.blocks(1),
             steps=accumulating_in_place),
    Scenario(name="evaluation", shard=shards.blocks(1), steps=evaluating),
    Scenario(name="replicate over one rank", shard=shards.replicated(1), steps=settled,
             needs=("replicate_with_fsdp",)),
]  # fmt: skip


@pytest.mark.parametrize("scenario", UNIFORM, ids=lambda s: s.name)
def test_uniform_dtype_moves_nothing(scenario: Scenario, ledger) -> None:
    if lacks := missing(scenario.needs):
        pytest.skip(f"this torch has no {lacks}")
    ours, plain = (counts_of(ledger, scenario, arm) for arm in (PLUGIN, "plain"))
    assert ours.moved_beyond(plain) == {}
    assert ours.comms == {}


def test_stock_moves_something(ledger) -> None:
    """The measure is not blind."""
    stock, plain = (counts_of(ledger, UNIFORM[0], arm) for arm in (STOCK, "plain"))
    assert sum(stock.moved_beyond(plain).values()) > 10


def mixed_root(run: Run) -> None:
    for block in run.module.blocks:
        fully_shard(block, mesh=run.mesh(1), mp_policy=MIXED)
    fully_shard(run.module, mesh=run.mesh(1), mp_policy=MIXED)


def all_bf16() -> models.Stack:
    """Its parameters, that is: the buffer stays as it is, and the module casts it itself."""
    model = models.Stack().to(BF16)
    model.scale = model.scale.float()
    return model


# The plain side is the module in bf16: the same operators, and no cast of a parameter.
MIXED_PRECISION = Scenario(name="bf16 over fp32", shard=mixed_root, steps=bf16_steps,
                           like_plain=False)  # fmt: skip
ALL_BF16 = Scenario(name="all bf16", model=all_bf16, steps=bf16_steps, arms=())


def test_mixed_precision_casts_once_a_group(ledger) -> None:
    ours = counts_of(ledger, MIXED_PRECISION, PLUGIN)
    extra = ours.moved_beyond(counts_of(ledger, ALL_BF16, "plain"))
    groups, unshards = 3, 2 + 2 + 1  # the root stays unsharded after its forward
    assert sum(extra.values()) <= unshards + groups, extra


REPLICAS = [
    Scenario(name="two replicas, hsdp", shard=shards.blocks(2, 1), steps=settled, world=2,
             like_plain=False),
    Scenario(name="two replicas, replicate", shard=shards.replicated(2), steps=settled, world=2,
             like_plain=False, needs=("replicate_with_fsdp",)),
]  # fmt: skip
ALONE = Scenario(name="no replicas", steps=settled, arms=())


@pytest.mark.parametrize("scenario", REPLICAS, ids=lambda s: s.name)
def test_replicas_flatten_once_a_group(scenario: Scenario, ledger) -> None:
    """One all-reduce a group, over one buffer that its gradients are written to once."""
    if lacks := missing(scenario.needs):
        pytest.skip(f"this torch has no {lacks}")
    ours = counts_of(ledger, scenario, PLUGIN)
    groups = 3
    assert ours.all_reduces == groups
    extra = ours.moved_beyond(counts_of(ledger, ALONE, "plain"))
    copies = {op: n for op, n in extra.items() if not op.startswith("c10d")}
    # gloo of old releases divides with an operator of its own (see ``standins``).
    copies.pop("aten::div_", None)
    assert sum(copies.values()) <= groups, extra


def test_costs_do_not_grow(ledger) -> None:
    """The tenth step dispatches what the third does."""

    def steps(run: Run) -> None:
        run.optimizer = sgd(run.module.parameters())
        for step in range(10):
            with run.count(f"step {step}"):
                backward(run, forward(run, f"step {step}", run.batch(step)))
            update(run, f"step {step}")

    scenario = Scenario(name="ten steps", shard=shards.blocks(1), steps=steps)
    third, tenth = (counts_of(ledger, scenario, PLUGIN, f"step {i}") for i in (2, 9))
    assert third.ops == tenth.ops


def test_many_replicas_cost_what_two_do() -> None:
    """Operators and Python calls of a step on an (8192, 1) mesh, whose collectives do nothing."""

    def on(replicas: int) -> tuple[Counter[str], Counter[str]]:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=replicas)
        names = ("replicate", "shard")
        mesh = init_device_mesh("cpu", (replicas, 1), mesh_dim_names=names)
        module = models.stack()
        for block in module.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh)
        calls: Counter[str] = Counter()

        def step() -> None:
            module(torch.ones(2, models.DIM)).sum().backward()
            module.zero_grad()

        def profile(frame: Any, event: str, argument: Any) -> None:
            if event == "call":
                calls[f"{frame.f_code.co_filename}: {frame.f_code.co_name}"] += 1
            elif event == "c_call":
                calls[argument.__name__] += 1

        for _ in range(3):
            step()
        sys.setprofile(profile)
        step()
        sys.setprofile(None)
        with counting(comms=False) as counts:
            step()
        dist.destroy_process_group()
        return counts.ops, calls

    def body(_: Any) -> None:
        import fsdp_skip1

        dist.destroy_process_group()
        with fsdp_skip1.enabled():
            (ops, calls), (ops_of_many, calls_of_many) = on(2), on(8192)
        assert ops["c10d::allreduce_"] == 3
        assert ops_of_many == ops
        assert calls_of_many == calls

    run_ranks(body, 1)
