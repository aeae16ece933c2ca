"""Explicit unshard and reshard, prefetching, and the setters that steer a group by hand."""

import pytest
import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from support import models, shards
from support.arms import Run, Scenario
from support.results import arm_tests
from support.steps import backward, forward, sgd, train, update

pytestmark = pytest.mark.scenario

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def blocks_of(run: Run) -> list[FSDPModule]:
    return list(run.module.blocks) if run.fsdp else []


# - Explicit unshard and reshard


def unshard_first(async_op: bool, wait: bool = True):
    """Unshards every block before the forward, with a handle or without."""

    def before(run: Run, step: int) -> None:
        handles = [block.unshard(async_op=async_op) for block in blocks_of(run)]
        for handle in handles:
            if handle is not None and wait:
                handle.wait()
        run.record_states(f"step {step}, unsharded")

    return before


def unshard_twice(run: Run, step: int) -> None:
    for block in blocks_of(run):
        handle = block.unshard(async_op=True)
        block.unshard()
        handle.wait()
        handle.wait()
        block.unshard()


def unshard_and_look(run: Run) -> None:
    """Between unshard and reshard a module shows its whole parameters; after it, the sharded."""
    run.optimizer = sgd(run.module.parameters())
    for step in range(2):
        block = run.module.blocks[0]
        if run.fsdp:
            block.unshard()
        run.record_all(f"step {step}/unsharded", dict(block.named_parameters()))
        with torch.no_grad():
            run.record(f"step {step}/norm", torch.stack([p.norm() for p in block.parameters()]))
        if run.fsdp:
            block.reshard()
        run.record_parameters(f"step {step}/resharded")
        run.record_states(f"step {step}/resharded")
        loss = forward(run, f"step {step}", run.batch(step))
        backward(run, loss)
        update(run, f"step {step}/updated")


def reshard_between(run: Run) -> None:
    """All parameters resharded by hand between forward and backward."""
    run.optimizer = sgd(run.module.parameters())
    for step in range(3):
        with run.count("step"):
            loss = forward(run, f"step {step}", run.batch(step))
            for module in run.fsdp_modules():
                module.reshard()
            run.record_states(f"step {step}, resharded")
            backward(run, loss)
        update(run, f"step {step}")


def unshard_before_lazy_init(run: Run) -> None:
    """A root unsharded before its first forward has no streams yet."""
    if run.fsdp:
        run.module.blocks[1].unshard()
        run.module.blocks[1].reshard()
        handle = run.module.blocks[0].unshard(async_op=True)
        handle.wait()
        run.record_states("unsharded")
        run.module.blocks[0].reshard()
    train(2)(run)


def forward_of_a_block(run: Run) -> None:
    """An encoder used alone for evaluation, then the whole model trained."""
    run.optimizer = sgd(run.module.parameters())
    forward(run, "whole, first", run.batch(0)).backward()
    update(run, "first")
    with torch.no_grad():
        run.record("alone", run.module.blocks[0](run.batch(1)))
    run.record_states("alone")
    backward(run, forward(run, "whole", run.batch(2)))
    update(run, "last")


# - Prefetching


def forward_prefetch(run: Run) -> None:
    shards.blocks(1)(run)
    first, second, third = run.module.blocks
    run.module.set_modules_to_forward_prefetch([first, second])
    first.set_modules_to_forward_prefetch([second, third])
    second.set_modules_to_forward_prefetch([third])


def backward_prefetch(run: Run) -> None:
    shards.blocks(1)(run)
    first, second, third = run.module.blocks
    third.set_modules_to_backward_prefetch([second, first])
    second.set_modules_to_backward_prefetch([first])


def both_prefetches(run: Run) -> None:
    forward_prefetch(run)
    first, second, third = run.module.blocks
    third.set_modules_to_backward_prefetch([second, first])


def unused_prefetch(run: Run) -> None:
    """A module is prefetched that this forward never reaches, so nothing waits for it."""
    mesh = run.mesh(1)
    for expert in run.module.experts:
        fully_shard(expert, mesh=mesh)
    fully_shard(run.module, mesh=mesh)
    first, second, third = run.module.experts
    run.module.set_modules_to_forward_prefetch([first, third])
    first.set_modules_to_backward_prefetch([second])


def async_unshard_in_forward(run: Run) -> None:
    shards.blocks(1)(run)
    for block in run.module.blocks:
        block._set_unshard_async_op(True)


def experts_by_turns(run: Run) -> None:
    run.optimizer = sgd(run.module.parameters())
    for step, active in enumerate([(0,), (0, 1), (2, 0), (1,), (0, 1, 2)]):
        run.module.active = active
        with run.count("step"):
            backward(run, forward(run, f"step {step}", run.batch(step)))
        update(run, f"step {step}")


def inference_leaves_entries(run: Run) -> None:
    """Forwards without a backward leave their entries in the prefetch order.

    The next backward then prefetches groups that are already done, and nothing waits for them.
    """
    run.optimizer = sgd(run.module.parameters())
    for step in range(3):
        with torch.no_grad():
            for index in range(2):
                run.record(f"step {step}/eval {index}", run.forward(run.batch(10 + index)))
        with run.count("step"):
            backward(run, forward(run, f"step {step}", run.batch(step)))
        run.record_states(f"step {step}, after backward")
        update(run, f"step {step}")


# - Setters


def no_unshard_in_backward(run: Run) -> None:
    """As for an embedding, whose weight backward does not need."""
    mesh = run.mesh(1)
    fully_shard(run.module.embedding, mesh=mesh)
    for block in run.module.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(run.module, mesh=mesh)
    run.module.embedding.set_unshard_in_backward(False)


def no_reshard_after_backward(run: Run) -> None:
    shards.blocks(1)(run)
    run.module.set_reshard_after_backward(False)


def reshard_before_update(run: Run, step: int) -> None:
    run.record_states(f"step {step}, after backward")
    for module in run.fsdp_modules():
        module.reshard()


def reshard_after_forward_by_setter(value: bool):
    def shard(run: Run) -> None:
        shards.blocks(1, reshard_after_forward=not value)(run)
        run.module.set_reshard_after_forward(value)

    return shard


def accumulate(run: Run) -> None:
    """Three microbatches without sync, resharding each time or not, then one with."""
    run.optimizer = sgd(run.module.parameters())
    for step in range(2):
        for index in range(4):
            last = index == 3
            if run.fsdp:
                run.module.set_requires_gradient_sync(last)
                run.module.set_reshard_after_backward(last or step == 1)
                run.module.set_is_last_backward(last)
            with run.count("step"):
                loss = forward(run, f"step {step}.{index}", run.batch(4 * step + index))
                backward(run, loss, sync=last)
            run.record_states(f"step {step}.{index}")
        update(run, f"step {step}")


def accumulate_into_sharded(run: Run) -> None:
    """Synchronized every time: sharded gradients add up in place."""
    run.optimizer = sgd(run.module.parameters())
    for step in range(2):
        for index in range(3):
            with run.count("step"):
                backward(run, forward(run, f"step {step}.{index}", run.batch(3 * step + index)))
            run.record_gradients(f"step {step}.{index}")
        update(run, f"step {step}")


def accumulate_replicas(run: Run) -> None:
    """HSDP with the all-reduce put off: partial sums, then one all-reduce for all of them."""
    run.optimizer = sgd(run.module.parameters())
    for step in range(2):
        for index in range(3):
            last = index == 2
            if run.fsdp:
                run.module.set_requires_all_reduce(last)
            with run.count("step"):
                loss = forward(run, f"step {step}.{index}", run.batch(3 * step + index))
                backward(run, loss, sync=last)
        update(run, f"step {step}")


def not_the_last_backward(run: Run) -> None:
    """Two losses, two backwards, one finalization."""
    run.optimizer = sgd(run.module.parameters())
    for step in range(2):
        losses = [forward(run, f"step {step}.{i}", run.batch(2 * step + i)) for i in range(2)]
        for index, loss in enumerate(losses):
            if run.fsdp:
                run.module.set_is_last_backward(index == 1)
            backward(run, loss)
            run.record_states(f"step {step}.{index}")
        update(run, f"step {step}")


def keep_unsharded_storage(run: Run) -> None:
    shards.blocks(1)(run)
    run.module.set_keep_unsharded_storage(True)


def raising(where: str):
    """An exception in forward or backward, recovery as the release has it, the next step."""

    def steps(run: Run) -> None:
        run.optimizer = sgd(run.module.parameters())

        class Boom(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                if where == "forward":
                    raise RuntimeError("boom")
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                raise RuntimeError("boom")

        for step in range(3):
            if step == 1:
                handle = run.module.blocks[1].register_forward_hook(
                    lambda module, args, output: Boom.apply(output)
                )
                with pytest.raises(RuntimeError, match="boom"):
                    run.forward(run.batch(step)).sum().backward()
                handle.remove()
                run.optimizer.zero_grad()
                if run.fsdp:
                    run.module.reset_iter_state()
                else:
                    for parameter in run.module.parameters():
                        parameter.grad = None
                run.record_states("recovered")
            backward(run, forward(run, f"step {step}", run.batch(step)))
            update(run, f"step {step}")

    return steps


def forward_method(run: Run) -> None:
    from torch.distributed.fsdp import register_fsdp_forward_method

    shards.blocks(1)(run)
    register_fsdp_forward_method(run.module, "encode")


class Encoder(models.Stack):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x).tanh()


def call_method(run: Run) -> None:
    run.optimizer = sgd(run.module.parameters())
    for step in range(2):
        output = run.module.encode(run.batch(step))
        run.record(f"step {step}/output", output)
        backward(run, output.sum())
        update(run, f"step {step}")


SCENARIOS = [
    # Explicit
    Scenario(name="unshard", shard=shards.blocks(1), steps=train(before=unshard_first(False))),
    Scenario(name="unshard asynchronously", shard=shards.blocks(1),
             steps=train(before=unshard_first(True))),
    Scenario(name="unshard asynchronously, handle dropped", shard=shards.blocks(1),
             steps=train(before=unshard_first(True, wait=False))),
    Scenario(name="unshard asynchronously, hsdp", shard=shards.blocks(2, 1), world=2, replicas=2,
             steps=train(before=unshard_first(True))),
    Scenario(name="unshard again and again", shard=shards.blocks(1),
             steps=train(before=unshard_twice)),
    Scenario(name="unshard asynchronously, bf16", like_plain=False,
             shard=shards.blocks(1, mp_policy=MIXED), steps=train(before=unshard_first(True))),
    Scenario(name="unshard, look, reshard", shard=shards.blocks(1), steps=unshard_and_look),
    Scenario(name="reshard between forward and backward", shard=shards.blocks(1),
             steps=reshard_between),
    Scenario(name="reshard between, kept after forward", steps=reshard_between,
             shard=shards.blocks(1, reshard_after_forward=False)),
    Scenario(name="unshard before lazy init", shard=shards.blocks(1),
             steps=unshard_before_lazy_init),
    Scenario(name="forward of one block", shard=shards.blocks(1), steps=forward_of_a_block),
    Scenario(name="a method registered as forward", model=Encoder, shard=forward_method,
             steps=call_method),
    # Prefetch
    Scenario(name="forward prefetch", model=models.stack_of(depth=3), shard=forward_prefetch,
             steps=train()),
    Scenario(name="backward prefetch", model=models.stack_of(depth=3), shard=backward_prefetch,
             steps=train()),
    Scenario(name="both prefetches", model=models.stack_of(depth=3), shard=both_prefetches,
             steps=train(micro=2)),
    Scenario(name="prefetch of what is not used", model=models.Branches, shard=unused_prefetch,
             steps=experts_by_turns),
    Scenario(name="asynchronous unshard in forward", shard=async_unshard_in_forward,
             steps=train()),
    Scenario(name="inference leaves prefetch entries", shard=shards.blocks(1), comm_mode=False,
             steps=inference_leaves_entries),
    Scenario(name="inference leaves prefetch entries, hsdp", shard=shards.blocks(2, 1), world=2,
             replicas=2, steps=inference_leaves_entries, comm_mode=False),
    # Setters
    Scenario(name="no unshard in backward", model=models.Transformer,
             shard=no_unshard_in_backward,
             steps=train(inputs=lambda run, step: run.batch(step, 2, 6).abs().long())),
    Scenario(name="no reshard after backward", shard=no_reshard_after_backward,
             steps=train(after_backward=reshard_before_update)),
    *(
        Scenario(name=f"set_reshard_after_forward({value})", steps=train(),
                 shard=reshard_after_forward_by_setter(value),
                 needs=("FSDPModule.set_reshard_after_forward",))
        for value in (True, False)
    ),
    Scenario(name="accumulation, 3 without sync and 1 with", shard=shards.blocks(1),
             steps=accumulate),
    Scenario(name="accumulation, 3 without sync and 1 with, bf16", like_plain=False,
             shard=shards.blocks(1, mp_policy=MIXED), steps=accumulate),
    Scenario(name="accumulation, 3 without sync and 1 with, hsdp", world=2, replicas=2,
             shard=shards.blocks(2, 1), steps=accumulate),
    Scenario(name="accumulation into sharded gradients", shard=shards.blocks(1),
             steps=accumulate_into_sharded),
    Scenario(name="accumulation into sharded gradients, hsdp", shard=shards.blocks(2, 1), world=2,
             like_plain=False, replicas=2, steps=accumulate_into_sharded),
    Scenario(name="no all-reduce but the last", shard=shards.blocks(2, 1), world=2, replicas=2,
             steps=accumulate_replicas),
    Scenario(name="no all-reduce but the last, bf16", world=2, replicas=2, like_plain=False,
             shard=shards.blocks(2, 1, mp_policy=MIXED), steps=accumulate_replicas),
    Scenario(name="no all-reduce but the last, replicate 2", world=2, replicas=2,
             shard=shards.replicated(2), steps=accumulate_replicas,
             needs=("replicate_with_fsdp",)),
    Scenario(name="two backwards, one the last", shard=shards.blocks(1),
             steps=not_the_last_backward),
    Scenario(name="unsharded storage kept", shard=keep_unsharded_storage, steps=train(),
             needs=("FSDPModule.set_keep_unsharded_storage",)),
    # Recovery. Stock keeps the root's gradients of a backward that failed; the plugin follows.
    *(
        Scenario(name=f"exception in {where}", shard=shards.blocks(1), steps=raising(where),
                 like_plain=where == "forward", needs=("FSDPModule.reset_iter_state",))
        for where in ("forward", "backward")
    ),
]  # fmt: skip


@arm_tests(SCENARIOS)
def test_scenario(scenario: Scenario, arm: str, ledger) -> None:
    ledger.judge(scenario, arm)
