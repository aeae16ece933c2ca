"""Cases that pytorch PR 160135 set out to mend, and the picture its follow-up drew.

They are told again here with models of our own: training at world size 1 matches the plain module
without an all-gather; beside tensor parallelism, FSDP2 of size 1 adds no all-gather, not even with
CPU offload; and a mesh of replicas alone trains as DDP does.
"""

import pytest
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from support import models, shards
from support.arms import FSDP_ARMS, PLUGIN_ARMS, Run, Scenario
from support.features import missing
from support.steps import adamw, backward, forward, sgd, tokens, train, update

pytestmark = pytest.mark.scenario


def long_run(run: Run) -> None:
    """Ten steps, every one counted."""
    run.optimizer = adamw(run.module.parameters())
    for step in range(10):
        with run.count("step"):
            loss = forward(run, f"step {step}", tokens(run, step))
            backward(run, loss)
        update(run, f"step {step}")


PARITY = Scenario(
    name="train parity at world size 1",
    model=models.Transformer,
    shard=shards.blocks(1),
    steps=long_run,
    comm_mode=True,
)


def tensor_parallel(run: Run) -> None:
    mesh = run.mesh(1, 2, names=("dp", "tp"))
    for block in run.module.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def offloaded(run: Run) -> None:
    options = {
        "mesh": run.mesh(1, 2, names=("dp", "tp"))["dp"],
        "offload_policy": CPUOffloadPolicy(pin_memory=False),
        "reshard_after_forward": True,
    }
    for block in run.module.blocks:
        fully_shard(block, **options)
    fully_shard(run.module, **options)


def forward_and_backward(run: Run) -> None:
    """CommDebugMode around each half, as the collectives of either could hide the other's."""
    run.optimizer = sgd(run.module.parameters())
    for step in range(2):
        with run.count("forward"):
            loss = forward(run, f"step {step}", run.batch(step))
        with run.count("backward"):
            backward(run, loss)
        update(run, f"step {step}")


OFFLOADED = Scenario(
    name="tensor parallelism with offloaded FSDP2 of size 1",
    model=models.Stack,
    prepare=tensor_parallel,
    shard=offloaded,
    steps=forward_and_backward,
    world=2,
)

LIKE_DDP = [
    Scenario(
        name="(2, 1) beside DDP",
        model=models.Transformer,
        shard=shards.blocks(2, 1),
        plain=shards.ddp,
        steps=train(10, inputs=tokens),
        world=2,
        replicas=2,
    ),
    Scenario(
        name="replicate beside DDP",
        model=models.Transformer,
        shard=shards.replicated(2),
        plain=shards.ddp,
        steps=train(10, inputs=tokens),
        world=2,
        replicas=2,
        needs=("replicate_with_fsdp",),
    ),
]


@pytest.mark.parametrize("arm", FSDP_ARMS)
def test_train_parity_at_world_size_one(arm: str, ledger) -> None:
    ledger.judge(PARITY, arm)
    if arm in PLUGIN_ARMS:
        (outcomes,) = ledger.outcomes(PARITY)
        counts = outcomes[arm].counts["step"]
        assert not counts.comms, f"collectives over one rank: {dict(counts.comms)}"
        assert counts.all_gathers == counts.reduce_scatters == counts.all_reduces == 0


@pytest.mark.parametrize("arm", FSDP_ARMS)
def test_tensor_parallel_keeps_its_own_collectives(arm: str, ledger) -> None:
    ledger.judge(OFFLOADED, arm)
    for outcomes in ledger.outcomes(OFFLOADED):
        for half in ("forward", "backward"):
            counts, alone = outcomes[arm].counts[half], outcomes["plain"].counts[half]
            assert alone.all_reduces > 0
            assert counts.all_reduces == alone.all_reduces
            if arm in PLUGIN_ARMS:
                assert counts.all_gathers == 0, half
                assert counts.comms == alone.comms, half


@pytest.mark.parametrize("arm", FSDP_ARMS)
@pytest.mark.parametrize("scenario", LIKE_DDP, ids=lambda s: s.name)
def test_replicas_train_as_ddp_does(scenario: Scenario, arm: str, ledger) -> None:
    if lacks := missing(scenario.needs):
        pytest.skip(f"this torch has no {lacks}")
    ledger.judge(scenario, arm)
    losses = [
        [outcomes[arm].records[f"step {step}/loss"].tensor().item() for step in range(10)]
        for outcomes in ledger.outcomes(scenario)
    ]
    # A picture worth its name: the curves fall, and the ranks see different data.
    assert all(curve[-1] < curve[0] for curve in losses)
    assert losses[0] != losses[1]
