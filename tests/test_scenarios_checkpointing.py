"""Activation checkpointing of all kinds; state dicts and storages that change under a model."""

import io
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint as checkpoint_function

from support import models, shards
from support.arms import Run, Scenario, param_groups
from support.results import arm_tests
from support.steps import adamw, backward, forward, sgd, tokens, train, update

pytestmark = pytest.mark.scenario

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


# - Activation checkpointing


class Checkpointed(models.Stack):
    """Calls ``torch.utils.checkpoint`` around each block."""

    def __init__(self, reentrant: bool):
        super().__init__(dropout=0.2)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint_function(block, x, use_reentrant=self.reentrant)
        return self.head(x)


class CheckpointedInside(models.Block):
    """Checkpoints its inner layers: recomputation happens inside the FSDP2 module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def inner(x: torch.Tensor) -> torch.Tensor:
            return self.down(torch.relu(self.up(self.norm(x))))

        return x + checkpoint_function(inner, x, use_reentrant=False)


def checkpointed_inside() -> nn.Module:
    model = models.Stack()
    model.blocks = nn.ModuleList(CheckpointedInside() for _ in range(2))
    return model


def composable(run: Run) -> None:
    from torch.distributed._composable.checkpoint_activation import checkpoint

    for block in run.module.blocks:
        checkpoint(block)


def wrapped(reentrant: bool):
    def prepare(run: Run) -> None:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
            CheckpointImpl,
            checkpoint_wrapper,
        )

        kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
        for index, block in enumerate(run.module.blocks):
            run.module.blocks[index] = checkpoint_wrapper(block, checkpoint_impl=kind)

    return prepare


def selective(run: Run) -> None:
    """Matrix products are kept, the rest is recomputed."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    for index, block in enumerate(run.module.blocks):
        run.module.blocks[index] = checkpoint_wrapper(
            block, context_fn=contexts, preserve_rng_state=False
        )


def requires_grad_batch(run: Run, step: int) -> torch.Tensor:
    return run.batch(step).requires_grad_()


# - State dicts


def sharded_copy(run: Run, assign: bool):
    """A new state dict of the same kind as the module's own."""
    generator = torch.Generator().manual_seed(5)
    values = {}
    for name, value in run.module.state_dict().items():
        full = torch.randn(value.shape, generator=generator).to(value.dtype)
        if isinstance(value, DTensor):
            full = distribute_tensor(full, value.device_mesh, value.placements)
        values[name] = full
    return values


def loading(assign: bool, between: str = "steps"):
    """Weights replaced in the middle of training."""

    def steps(run: Run) -> None:
        run.optimizer = sgd(run.module.parameters())
        for step in range(4):
            if step == 2 and between == "steps":
                replace(run)
            loss = forward(run, f"step {step}", run.batch(step))
            backward(run, loss)
            update(run, f"step {step}")
            if between == "evaluations":
                with torch.no_grad():
                    run.record(f"step {step}/before", run.forward(run.batch(9)))
                    if step == 2:
                        replace(run)
                    run.record(f"step {step}/after", run.forward(run.batch(9)))
            run.record_all(f"step {step}/state", run.module.state_dict())

    def replace(run: Run) -> None:
        run.module.load_state_dict(sharded_copy(run, assign), assign=assign)
        if assign:
            run.optimizer = sgd(run.module.parameters())

    return steps


def round_trip(run: Run) -> None:
    """Saved through bytes in mid-training, trained on, loaded back, trained again."""
    run.optimizer = sgd(run.module.parameters())
    for step in range(2):
        backward(run, forward(run, f"step {step}", run.batch(step)))
        update(run, f"step {step}")
    buffer = io.BytesIO()
    torch.save(
        {k: v.to_local() if isinstance(v, DTensor) else v for k, v in state(run).items()}, buffer
    )
    backward(run, forward(run, "step 2", run.batch(2)))
    update(run, "step 2")
    buffer.seek(0)
    loaded = torch.load(buffer)
    with torch.no_grad():
        for name, value in state(run).items():
            target = value.to_local() if isinstance(value, DTensor) else value
            target.copy_(loaded[name])
    backward(run, forward(run, "step 3", run.batch(2)))
    update(run, "step 3")


def state(run: Run) -> dict[str, torch.Tensor]:
    return run.module.state_dict()


def state_dict_while_unsharded(run: Run) -> None:
    """A state dict asked for between forward and backward, and between unshard and reshard."""
    run.optimizer = sgd(run.module.parameters())
    for step in range(2):
        loss = forward(run, f"step {step}", run.batch(step))
        run.record_all(f"step {step}/state", run.module.state_dict())
        run.record_states(f"step {step}, after state dict")
        backward(run, loss)
        update(run, f"step {step}")
        if run.fsdp:
            run.module.blocks[0].unshard()
        run.record_all(f"step {step}/state again", run.module.state_dict())
        if run.fsdp:
            run.module.blocks[0].reshard()


def model_state_dict(full: bool):
    """The helpers of ``torch.distributed.checkpoint``, model and optimizer, there and back."""

    def steps(run: Run) -> None:
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            get_state_dict,
            set_state_dict,
        )

        options = StateDictOptions(full_state_dict=full, cpu_offload=full)
        run.optimizer = adamw(run.module.parameters())
        for step in range(2):
            backward(run, forward(run, f"step {step}", run.batch(step)))
            update(run, f"step {step}")
        weights, moments = get_state_dict(run.module, run.optimizer, options=options)
        weights, moments = clone(weights), clone(moments)
        run.record_all("state", weights)
        for name, values in moments["state"].items():
            run.record_all(f"optimizer/{name}", values)
        backward(run, forward(run, "step 2", run.batch(2)))
        update(run, "step 2")
        set_state_dict(
            run.module,
            run.optimizer,
            model_state_dict=weights,
            optim_state_dict=moments,
            options=options,
        )
        run.record_parameters("loaded")
        backward(run, forward(run, "step 3", run.batch(2)))
        update(run, "step 3")

    return steps


def clone(tree):
    if isinstance(tree, dict):
        return {key: clone(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [clone(value) for value in tree]
    return tree.detach().clone() if isinstance(tree, torch.Tensor) else tree


def distributed_checkpoint(run: Run) -> None:
    """Saved and loaded with DCP, into the module that is training."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    run.optimizer = sgd(run.module.parameters())
    for step in range(2):
        backward(run, forward(run, f"step {step}", run.batch(step)))
        update(run, f"step {step}")
    directory = str(run.directory / "saved")
    dcp.save({"model": get_model_state_dict(run.module)}, checkpoint_id=directory)
    backward(run, forward(run, "step 2", run.batch(2)))
    update(run, "step 2")
    weights = get_model_state_dict(run.module)
    dcp.load({"model": weights}, checkpoint_id=directory)
    set_model_state_dict(run.module, weights)
    run.record_parameters("loaded")
    backward(run, forward(run, "step 3", run.batch(2)))
    update(run, "step 3")


# - Storages that change


def converted(convert, when: int, optimizer=sgd, inputs=None):
    """``module.to(...)`` and its like; at 0 before the first forward, later between steps."""

    def steps(run: Run) -> None:
        dtype = torch.float32
        run.optimizer = optimizer(run.module.parameters())
        for step in range(3):
            if step == when:
                convert(run.module)
                dtype = next(run.module.parameters()).dtype
                run.optimizer = optimizer(run.module.parameters())
            backward(run, forward(run, f"step {step}", run.batch(step).to(dtype)))
            update(run, f"step {step}")

    return steps


def swapped_storage(run: Run) -> None:
    """``.data`` of every parameter put into another storage, as offloading libraries do."""
    run.optimizer = sgd(run.module.parameters())
    for step in range(3):
        if step == 1:
            run.module._apply(lambda t: t.clone())
        backward(run, forward(run, f"step {step}", run.batch(step)))
        update(run, f"step {step}")


def materialized_again(run: Run) -> None:
    """``to_empty`` and new values after training had begun."""
    run.optimizer = sgd(run.module.parameters())
    for step in range(3):
        if step == 1:
            run.module.to_empty(device="cpu")
            torch.manual_seed(11)
            with torch.no_grad():
                for tensor in [*run.module.parameters(), *run.module.buffers()]:
                    values = torch.randn(tensor.shape)
                    target = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                    target.copy_(values)
            run.optimizer = sgd(run.module.parameters())
        backward(run, forward(run, f"step {step}", run.batch(step)))
        update(run, f"step {step}")


def reset_parameters(run: Run) -> None:
    run.optimizer = sgd(run.module.parameters())
    for step in range(3):
        if step == 1:
            torch.manual_seed(13)
            for block in run.module.blocks:
                block.up.reset_parameters()
        backward(run, forward(run, f"step {step}", run.batch(step)))
        update(run, f"step {step}")


def memory_is_bounded(run: Run) -> None:
    """The unsharded parameters of a resharded group hold no memory of their own."""
    train(2)(run)
    if run.fsdp:
        for group in param_groups(run.module):
            for parameter in group.fsdp_params:
                held = sum(t.untyped_storage().size() for t in parameter.all_gather_outputs)
                assert held == 0, f"{parameter} holds {held} bytes after reshard"


SCENARIOS = [
    # Activation checkpointing
    *(
        Scenario(name=f"checkpoint function, reentrant={reentrant}", comm_mode=False,
                 model=partial(Checkpointed, reentrant), shard=shards.blocks(1),
                 steps=train(inputs=requires_grad_batch))
        for reentrant in (False, True)
    ),
    Scenario(name="checkpoint function inside a block", model=checkpointed_inside,
             shard=shards.blocks(1), steps=train()),
    Scenario(name="composable checkpoint", prepare=composable, shard=shards.blocks(1),
             comm_mode=False, steps=train()),
    Scenario(name="composable checkpoint, hsdp", prepare=composable, shard=shards.blocks(2, 1),
             world=2, replicas=2, comm_mode=False, steps=train()),
    *(
        Scenario(name=f"checkpoint wrapper, reentrant={reentrant}", comm_mode=False,
                 prepare=wrapped(reentrant), shard=shards.blocks(1),
                 steps=train(inputs=requires_grad_batch))
        for reentrant in (False, True)
    ),
    Scenario(name="checkpoint wrapper, bf16", prepare=wrapped(False), like_plain=False,
             shard=shards.blocks(1, mp_policy=MIXED), comm_mode=False, steps=train()),
    Scenario(name="checkpoint wrapper, accumulation", prepare=wrapped(False), comm_mode=False,
             shard=shards.blocks(1), steps=train(micro=2)),
    Scenario(name="selective checkpoint", prepare=selective, shard=shards.blocks(1),
             comm_mode=False, steps=train(counted=None)),
    Scenario(name="checkpoint wrapper, transformer", prepare=wrapped(False), comm_mode=False,
             model=models.Transformer, shard=shards.blocks(1), steps=train(inputs=tokens)),
    # State dicts
    *(
        Scenario(name=f"load_state_dict between {between}, assign={assign}",
                 shard=shards.blocks(1), steps=loading(assign, between))
        for between in ("steps", "evaluations")
        for assign in (False, True)
    ),
    Scenario(name="load_state_dict, assign=True, hsdp", world=2, replicas=2,
             shard=shards.blocks(2, 1), steps=loading(True)),
    Scenario(name="load_state_dict, assign=True, bf16", like_plain=False,
             shard=shards.blocks(1, mp_policy=MIXED), steps=loading(True)),
    Scenario(name="saved and copied back", shard=shards.blocks(1), steps=round_trip),
    Scenario(name="state dict while unsharded", shard=shards.blocks(1),
             steps=state_dict_while_unsharded),
    *(
        Scenario(name=f"checkpoint.state_dict, full={full}", shard=shards.blocks(1),
                 steps=model_state_dict(full))
        for full in (False, True)
    ),
    Scenario(name="distributed checkpoint", shard=shards.blocks(1), steps=distributed_checkpoint),
    Scenario(name="distributed checkpoint, hsdp", shard=shards.blocks(2, 1), world=2, replicas=2,
             steps=distributed_checkpoint),
    # Storages
    Scenario(name="module.to(bf16) before the first forward", shard=shards.blocks(1),
             steps=converted(lambda m: m.to(torch.bfloat16), 0)),
    Scenario(name="module.double() before the first forward", shard=shards.blocks(1),
             steps=converted(lambda m: m.double(), 0)),
    Scenario(name="module.to(device) between steps", shard=shards.blocks(1),
             steps=converted(lambda m: m.to("cpu"), 1)),
    Scenario(name="storages cloned between steps", shard=shards.blocks(1), steps=swapped_storage),
    Scenario(name="to_empty between steps", shard=shards.blocks(1), steps=materialized_again),
    Scenario(name="reset_parameters between steps", shard=shards.blocks(1),
             steps=reset_parameters),
    Scenario(name="nothing held after reshard", shard=shards.blocks(1), steps=memory_is_bounded),
    Scenario(name="nothing held after reshard, offload", steps=memory_is_bounded,
             shard=shards.blocks(1, offload_policy=CPUOffloadPolicy(pin_memory=False))),
]  # fmt: skip


@arm_tests(SCENARIOS)
def test_scenario(scenario: Scenario, arm: str, ledger) -> None:
    ledger.judge(scenario, arm)
