"""Switched off and on at every moment a user could choose: the numbers go on as in stock torch."""

import threading

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy

from support import shards
from support.arms import Run, Scenario, param_groups
from support.results import arm_tests
from support.steps import backward, forward, sgd, update

pytestmark = pytest.mark.scenario

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def between_steps(run: Run) -> None:
    """On, off, on, off, on."""
    for step in range(5):
        run.toggle(step % 2 == 0)
        step_once(run, step)


def between_forward_and_backward(run: Run) -> None:
    """The forward under one regime, its backward under the other; both ways."""
    for step in range(4):
        run.toggle(step % 2 == 0)
        loss = forward(run, f"step {step}", run.batch(step))
        run.toggle(step % 2 == 1)
        run.record_states(f"step {step}, toggled")
        backward(run, loss)
        update(run, f"step {step}")


def between_two_forwards_and_backward(run: Run) -> None:
    """Two forwards under different regimes, and one backward through both."""
    for step in range(2):
        run.toggle(step == 0)
        first = forward(run, f"step {step}.0", run.batch(step))
        run.toggle(step == 1)
        second = forward(run, f"step {step}.1", run.batch(5 + step))
        backward(run, first + second)
        update(run, f"step {step}")


def between_unshard_and_wait(run: Run) -> None:
    for step in range(4):
        run.toggle(step % 2 == 0)
        handles = []
        if run.fsdp:
            handles = [block.unshard(async_op=True) for block in run.module.blocks]
        run.toggle(step % 2 == 1)
        for handle in handles:
            handle.wait()
        run.record_states(f"step {step}, unsharded")
        step_once(run, step)


def pending_forever(run: Run) -> None:
    """An unshard that nothing waits for is pending when the switch is thrown."""
    for step in range(4):
        run.toggle(step % 2 == 0)
        if run.fsdp:
            run.module.blocks[1].unshard(async_op=True)
        run.toggle(step % 2 == 1)
        run.record_states(f"step {step}, pending")
        step_once(run, step)


def while_unsharded(run: Run) -> None:
    """After an evaluation the root stays unsharded, and so does a block unsharded by hand."""
    for step in range(4):
        run.toggle(step % 2 == 0)
        with torch.no_grad():
            run.record(f"step {step}/eval", run.forward(run.batch(9)))
        if run.fsdp:
            run.module.blocks[0].unshard()
        run.toggle(step % 2 == 1)
        run.record_states(f"step {step}, toggled")
        run.record_all(f"step {step}/unsharded", dict(run.module.blocks[0].named_parameters()))
        if run.fsdp:
            for module in run.fsdp_modules():
                module.reshard()
        step_once(run, step)


def between_microbatches(run: Run) -> None:
    """Gradients that wait for a sync are handed from one regime to the other."""
    for step in range(2):
        for index in range(4):
            run.toggle((index + step) % 2 == 0)
            if run.fsdp and isinstance(run.module, FSDPModule):
                run.module.set_requires_gradient_sync(index == 3)
            loss = forward(run, f"step {step}.{index}", run.batch(4 * step + index))
            backward(run, loss, sync=index == 3)
        update(run, f"step {step}")


def between_sums(run: Run) -> None:
    """Sharded gradients, and partial sums of replicas, that one regime began and the other ends."""
    for step in range(2):
        for index in range(3):
            run.toggle((index + step) % 2 == 0)
            if run.fsdp:
                run.module.set_requires_all_reduce(index == 2)
            loss = forward(run, f"step {step}.{index}", run.batch(3 * step + index))
            backward(run, loss, sync=index == 2)
        update(run, f"step {step}")


def in_forward_hook(run: Run) -> None:
    """In the middle of a forward, from inside a block that is unsharded."""
    on = [True]

    def flip(*unused) -> None:
        on[0] = not on[0]
        run.toggle(on[0])

    run.module.blocks[0].up.register_forward_hook(flip)
    for step in range(4):
        step_once(run, step)


def in_backward_hook(run: Run) -> None:
    """In the middle of a backward, between one block's reduction and the next one's unshard."""
    on = [True]

    def flip(grad: torch.Tensor) -> None:
        on[0] = not on[0]
        run.toggle(on[0])

    for block in run.module.blocks:
        block.up.register_forward_hook(
            lambda module, args, output: output.register_hook(flip) and None
        )
    for step in range(3):
        step_once(run, step)


def in_accumulate_hook(run: Run) -> None:
    """From a post-accumulate hook, while gradients are being handed out."""
    on = [True]

    def flip(parameter: torch.nn.Parameter) -> None:
        on[0] = not on[0]
        run.toggle(on[0])

    run.module.blocks[0].up.weight.register_post_accumulate_grad_hook(flip)
    for step in range(4):
        step_once(run, step)


def in_another_thread(run: Run) -> None:
    for step in range(4):
        thread = threading.Thread(target=run.toggle, args=(step % 2 == 1,))
        loss = forward(run, f"step {step}", run.batch(step))
        thread.start()
        thread.join()
        backward(run, loss)
        update(run, f"step {step}")


def from_shared_to_copied(run: Run) -> None:
    """``zero_copy`` changed while on, between steps and between forward and backward."""
    for step in range(4):
        _enable(run, zero_copy=step % 2 == 0)
        loss = forward(run, f"step {step}", run.batch(step))
        _enable(run, zero_copy=step % 2 == 1)
        backward(run, loss)
        update(run, f"step {step}")


def _enable(run: Run, zero_copy: bool) -> None:
    if run.plugin:
        import fsdp_skip1

        fsdp_skip1.enable(zero_copy=zero_copy)


def nothing_left(run: Run) -> None:
    """After ``disable()`` the model is as if we had never been: no attribute, no shared memory."""
    for step in range(2):
        step_once(run, step)
    with torch.no_grad():
        run.record("eval", run.forward(run.batch(9)))
    run.toggle(False)
    if run.fsdp:
        for index, group in enumerate(param_groups(run.module)):
            run.record(f"fsdp/group {index}", str(sorted(vars(group))))
            for fsdp_param in group.fsdp_params:
                name = fsdp_param._param_fqn
                run.record(f"fsdp/attributes of {name}", str(sorted(vars(fsdp_param))))
                sharded = fsdp_param._sharded_local_tensor.untyped_storage()
                whole = fsdp_param._unsharded_param.untyped_storage()
                run.record(f"fsdp/shared {name}", _share(sharded, whole))
                run.record(f"fsdp/bytes {name}", whole.size())
        run.record("fsdp/class", str(sorted(vars(type(group)))))
    backward(run, forward(run, "after", run.batch(5)))
    update(run, "after")


def _share(a: torch.UntypedStorage, b: torch.UntypedStorage) -> bool:
    return a.data_ptr() != 0 and a.data_ptr() == b.data_ptr()


def off_from_the_start(run: Run) -> None:
    """Off before the first forward, so that torch alone sets everything up; then on."""
    run.toggle(False)
    for step in range(4):
        if step == 2:
            run.toggle(True)
        step_once(run, step)


def step_once(run: Run, step: int) -> None:
    backward(run, forward(run, f"step {step}", run.batch(step)))
    update(run, f"step {step}")


def with_optimizer(steps):
    def run_steps(run: Run) -> None:
        run.optimizer = sgd(run.module.parameters())
        steps(run)

    return run_steps


MOMENTS = (
    between_steps,
    between_forward_and_backward,
    between_two_forwards_and_backward,
    between_unshard_and_wait,
    pending_forever,
    while_unsharded,
    between_microbatches,
    in_forward_hook,
    in_backward_hook,
    in_accumulate_hook,
    in_another_thread,
    from_shared_to_copied,
    nothing_left,
    off_from_the_start,
)
SETTINGS = {
    "": {"shard": shards.blocks(1)},
    ", kept after forward": {"shard": shards.blocks(1, reshard_after_forward=False)},
    ", bf16": {"shard": shards.blocks(1, mp_policy=MIXED), "like_plain": False},
    ", offload": {
        "shard": shards.blocks(1, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    },
}

SCENARIOS = [
    *(
        Scenario(name=f"toggled {moment.__name__.replace('_', ' ')}{name}", size_one=None,
                 steps=with_optimizer(moment), **setting)
        for moment in MOMENTS
        for name, setting in SETTINGS.items()
    ),
    *(
        Scenario(name=f"toggled {moment.__name__.replace('_', ' ')}, hsdp", size_one=None,
                 steps=with_optimizer(moment), shard=shards.blocks(2, 1), world=2, replicas=2)
        for moment in (between_forward_and_backward, between_microbatches, between_sums,
                       in_backward_hook, nothing_left)
    ),
    *(
        Scenario(name=f"toggled {moment.__name__.replace('_', ' ')}, replicate", size_one=None,
                 steps=with_optimizer(moment), shard=shards.replicated(2), world=2, replicas=2,
                 needs=("replicate_with_fsdp",))
        for moment in (between_forward_and_backward, between_sums, nothing_left)
    ),
    # Groups that are really sharded are left alone, whatever the switch does.
    Scenario(name="toggled between steps, sharded", size_one=None, world=2, like_plain=False,
             steps=with_optimizer(between_steps), shard=shards.blocks(2)),
    Scenario(name="toggled between forward and backward, sharded", size_one=None, world=2,
             steps=with_optimizer(between_forward_and_backward), shard=shards.blocks(2),
             like_plain=False),
]  # fmt: skip


@arm_tests(SCENARIOS)
def test_scenario(scenario: Scenario, arm: str, ledger) -> None:
    ledger.judge(scenario, arm)
