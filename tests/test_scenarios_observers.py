"""Tools that watch FSDP2 from the outside: trackers and debuggers that read or wrap its state."""

import contextlib
import logging

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from support import models, shards
from support.arms import Run, Scenario, param_groups
from support.results import arm_tests
from support.steps import backward, forward, loss_of, sgd, update

pytestmark = pytest.mark.scenario

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def under_memory_tracker(run: Run) -> None:
    """FSDPMemTracker replaces hooks and methods of every group and books what it sees there."""
    run.optimizer = sgd(run.module.parameters())
    x = run.batch(0)
    if run.fsdp:
        from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

        tracker = FSDPMemTracker(run.module, run.optimizer)
        tracker.track_inputs((x,))
    else:
        tracker = contextlib.nullcontext()
    with tracker:
        loss = loss_of(run.forward(x))
        loss.backward()
        run.optimizer.step()
    run.record("tracked/loss", loss)
    run.record_gradients("tracked")
    run.record_parameters("tracked")
    run.optimizer.zero_grad()
    if run.fsdp:
        peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
        assert peak["Total"] > 0
        run.record("fsdp/tracked modules", len(tracker.memory_tracking))
        run.record_states("tracked")
    # The tracker puts everything back; training goes on.
    backward(run, forward(run, "after", run.batch(1)))
    update(run, "after")


def with_logging(run: Run) -> None:
    """FSDP2's debug log tells the same story."""
    run.optimizer = sgd(run.module.parameters())
    logger = logging.getLogger("torch.distributed.fsdp.fully_shard")
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        for step in range(2):
            backward(run, forward(run, f"step {step}", run.batch(step)))
            update(run, f"step {step}")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    run.record("fsdp/log", str(lines))


def wrapped_methods(run: Run) -> None:
    """Methods wrapped on instances, as debuggers do, are called as often as on stock."""
    run.optimizer = sgd(run.module.parameters())
    forward(run, "first", run.batch(9)).backward()
    update(run, "first")
    calls: list[str] = []

    def wrap(group, name: str, index: int) -> None:
        original = getattr(group, name)

        def method(*args, **kwargs):
            calls.append(f"{index} {name}")
            return original(*args, **kwargs)

        setattr(group, name, method)

    names = ("unshard", "wait_for_unshard", "reshard", "pre_backward", "post_backward")
    groups = param_groups(run.module)
    for index, group in enumerate(groups):
        for name in names:
            wrap(group, name, index)
    for step in range(2):
        backward(run, forward(run, f"step {step}", run.batch(step)))
        update(run, f"step {step}")
    for group in groups:
        for name in names:
            delattr(group, name)
    run.record("fsdp/calls", str(calls))


def peeking(run: Run) -> None:
    """What a debugger reads from each group while a module runs."""
    run.optimizer = sgd(run.module.parameters())
    seen: list[str] = []

    def look(module, *unused) -> None:
        for index, group in enumerate(param_groups(run.module)):
            shapes = [tuple(p.unsharded_param.shape) for p in group.fsdp_params if unsharded(p)]
            seen.append(f"{index} {group.is_unsharded} {group._training_state.name} {shapes}")

    def unsharded(fsdp_param) -> bool:
        return fsdp_param.sharded_state.name == "UNSHARDED"

    for block in run.module.blocks:
        block.up.register_forward_hook(look)
        block.up.register_full_backward_pre_hook(look)
    for step in range(2):
        backward(run, forward(run, f"step {step}", run.batch(step)))
        update(run, f"step {step}")
        run.record(f"fsdp/step {step}/seen", str(seen))
        seen.clear()


def version_counters(run: Run) -> None:
    """Autograd must not take an update between two uses of a weight for a change in place."""
    run.optimizer = sgd(run.module.parameters())
    kept = []
    for step in range(3):
        backward(run, forward(run, f"step {step}", run.batch(step)))
        update(run, f"step {step}")
        kept.append(run.module.blocks[0].up.weight)
    run.record("same parameters", all(weight is kept[0] for weight in kept))


SCENARIOS = [
    Scenario(name="memory tracker", model=models.stack_of(hidden=16), shard=shards.blocks(1),
             steps=under_memory_tracker, needs=("mem tracker",)),
    Scenario(name="memory tracker, bf16", shard=shards.blocks(1, mp_policy=MIXED),
             like_plain=False, steps=under_memory_tracker, needs=("mem tracker",)),
    Scenario(name="memory tracker, offload", steps=under_memory_tracker, needs=("mem tracker",),
             shard=shards.blocks(1, offload_policy=CPUOffloadPolicy(pin_memory=False))),
    Scenario(name="memory tracker, hsdp", world=2, replicas=2, like_plain=False,
             shard=shards.blocks(2, 1), steps=under_memory_tracker, needs=("mem tracker",)),
    Scenario(name="debug log", shard=shards.blocks(1), steps=with_logging),
    Scenario(name="methods wrapped on instances", shard=shards.blocks(1), steps=wrapped_methods),
    Scenario(name="groups read in mid-step", shard=shards.blocks(1), steps=peeking),
    Scenario(name="groups read in mid-step, kept after forward", steps=peeking,
             shard=shards.blocks(1, reshard_after_forward=False)),
    Scenario(name="parameters keep their identity", shard=shards.blocks(1),
             steps=version_counters),
]  # fmt: skip


@arm_tests(SCENARIOS)
def test_scenario(scenario: Scenario, arm: str, ledger) -> None:
    ledger.judge(scenario, arm)
