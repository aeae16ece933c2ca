"""Resharding, mixed precision and offload policies; what belongs to a group and what does not."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from support import models, shards
from support.arms import Run, Scenario
from support.results import arm_tests
from support.steps import sgd, tokens, train

pytestmark = pytest.mark.scenario

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OFFLOAD = CPUOffloadPolicy(pin_memory=False)


# - Mixed precision

POLICIES = {
    "bf16": MixedPrecisionPolicy(param_dtype=BF16),
    "bf16, reduce fp32": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32),
    "bf16, reduce bf16": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16),
    "bf16, output fp32": MixedPrecisionPolicy(
        param_dtype=BF16, reduce_dtype=FP32, output_dtype=FP32
    ),
    "fp16": MixedPrecisionPolicy(param_dtype=FP16),
    "fp16, reduce fp32": MixedPrecisionPolicy(param_dtype=FP16, reduce_dtype=FP32),
    "reduce bf16 alone": MixedPrecisionPolicy(reduce_dtype=BF16),
    "output bf16 alone": MixedPrecisionPolicy(output_dtype=BF16),
    "bf16, inputs as they come": MixedPrecisionPolicy(
        param_dtype=BF16, reduce_dtype=FP32, cast_forward_inputs=False
    ),
}


def mixed(kind: str, *mesh: int, **kwargs) -> Scenario:
    policy = POLICIES[kind]
    within = replace(policy, output_dtype=None)
    options = {
        "name": f"mixed precision, {kind}, mesh {mesh}",
        "shard": shards.blocks(*mesh, mp_policy=within, root={"mp_policy": policy}),
        "plain": shards.mixed_by_hand(policy),
        "steps": train(inputs=batch_for(policy)),
        # A reduction in another dtype alone is nothing that casts of parameters could say.
        "like_plain": len(mesh) == 1 and policy.reduce_dtype in (None, FP32, policy.param_dtype),
        **kwargs,
    }
    return Scenario(**options)


def batch_for(policy: MixedPrecisionPolicy):
    dtype = policy.param_dtype if not policy.cast_forward_inputs else None
    return lambda run, step: run.batch(step).to(dtype)


def bf16_model() -> nn.Module:
    return models.Stack().to(BF16)


def mixed_block_and_root(run: Run) -> None:
    """Blocks in bf16 inside an fp32 root, as models with an fp32 head have it."""
    mesh = run.mesh(1)
    for block in run.module.blocks:
        fully_shard(
            block,
            mesh=mesh,
            mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32, output_dtype=FP32),
        )
    fully_shard(run.module, mesh=mesh)


def buffers_follow(run: Run) -> None:
    fully_shard(
        run.module,
        mesh=run.mesh(1),
        mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32),
    )


# - Frozen, tied, shared and ignored parameters


def freeze_block(run: Run) -> None:
    run.module.blocks[0].requires_grad_(False)


def freeze_some(run: Run) -> None:
    for name, parameter in run.module.named_parameters():
        parameter.requires_grad_("norm" not in name and "up.bias" not in name)


def freeze_all_but_head(run: Run) -> None:
    run.module.requires_grad_(False)
    run.module.head.requires_grad_(True)


def freeze_later(run: Run, step: int) -> None:
    """Frozen from the second step on: the group is what it was, its parameters are not."""
    if step == 1:
        for parameter in run.module.blocks[0].parameters():
            parameter.requires_grad_(False)
            parameter.grad = None


def shared_block(run: Run) -> None:
    mesh = run.mesh(1)
    fully_shard(run.module.first, mesh=mesh)
    fully_shard(run.module, mesh=mesh)


def tied_in_group(run: Run) -> None:
    """Tied modules have to share a group, which may have a block between them."""
    mesh = run.mesh(1)
    fully_shard(run.module.blocks[0], mesh=mesh)
    fully_shard([run.module.embedding, run.module.out], mesh=mesh)
    fully_shard(run.module, mesh=mesh)


def without_head(run: Run) -> None:
    mesh = run.mesh(1)
    ignored = set(run.module.head.parameters())
    for block in run.module.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(run.module, mesh=mesh, ignored_params=ignored)


def ignored_in_block(run: Run) -> None:
    mesh = run.mesh(1)
    for block in run.module.blocks:
        fully_shard(block, mesh=mesh, ignored_params={block.norm.weight})
    fully_shard(
        run.module,
        mesh=mesh,
        ignored_params={block.norm.weight for block in run.module.blocks},
    )


class Odd(nn.Module):
    """Parameters of sizes that a shard could trip over: one element, many dims, none used."""

    def __init__(self):
        super().__init__()
        self.one = nn.Parameter(torch.full((1,), 0.5))
        self.cube = nn.Parameter(torch.randn(3, 1, 5))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.conv = nn.Conv1d(2, 3, 3, padding=1, bias=False)
        self.blocks = nn.ModuleList([nn.Conv1d(3, 3, 1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x.view(4, 2, 4))
        x = self.blocks[0](x).mean(-1, keepdim=True).unsqueeze(-1)
        return (x * self.cube).sum(-2) * self.one


# - Meta device


def meta_model() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(models.Resettable(), models.Resettable())


def materialize(run: Run) -> None:
    """After sharding in the FSDP2 arms, as users do; straight away in the plain one."""
    run.module.to_empty(device="cpu")
    torch.manual_seed(3)
    for layer in run.module:
        layer.reset_parameters()


def meta_sharded(run: Run) -> None:
    mesh = run.mesh(1)
    for layer in run.module:
        fully_shard(layer, mesh=mesh)
    fully_shard(run.module, mesh=mesh)
    materialize(run)


def loaded_onto_meta(assign: bool):
    """Weights that come from a state dict instead of an initializer."""

    def apply(run: Run) -> None:
        from torch.distributed.tensor import distribute_tensor

        mesh = run.mesh(1)
        if run.fsdp:
            for layer in run.module:
                fully_shard(layer, mesh=mesh)
            fully_shard(run.module, mesh=mesh)
        if not assign:
            run.module.to_empty(device="cpu")
        torch.manual_seed(3)
        weights = {}
        for name, value in run.module.state_dict().items():
            full = torch.randn(value.shape)
            sharded = isinstance(value, torch.distributed.tensor.DTensor)
            weights[name] = distribute_tensor(full, mesh, value.placements) if sharded else full
        run.module.load_state_dict(weights, assign=assign)

    return apply


SCENARIOS = [
    # reshard_after_forward
    *(
        Scenario(name=f"reshard after forward {value!r}", steps=train(),
                 shard=shards.blocks(1, reshard_after_forward=value))
        for value in (True, False, 1)
    ),
    Scenario(name="reshard after forward None, hsdp", steps=train(), world=2, replicas=2,
             needs=("reshard_after_forward=None",),
             shard=shards.blocks(2, 1, reshard_after_forward=None)),
    *(
        Scenario(name=f"reshard after forward {value!r}, bf16", like_plain=False, steps=train(),
                 shard=shards.blocks(1, reshard_after_forward=value,
                                     mp_policy=POLICIES["bf16, reduce fp32"]))
        for value in (True, False)
    ),
    # Mixed precision
    *(mixed(name, 1) for name in POLICIES),
    *(mixed(name, 2, 1, world=2, replicas=2) for name in ("bf16, reduce fp32", "fp16")),
    mixed("bf16, reduce fp32", 4, 1, world=4, replicas=4),
    mixed("bf16, reduce fp32", 1, name="mixed precision, accumulation", steps=train(micro=3)),
    mixed("bf16, reduce bf16", 1, name="mixed precision, bf16 accumulation", like_plain=False,
          steps=train(micro=3)),
    Scenario(name="mixed precision, replicate 2", world=2, replicas=2, steps=train(),
             like_plain=False, needs=("replicate_with_fsdp",),
             shard=shards.replicated(2, mp_policy=POLICIES["bf16, reduce fp32"])),
    Scenario(name="mixed precision, blocks in bf16 under an fp32 root", steps=train(),
             shard=mixed_block_and_root, like_plain=False),
    Scenario(name="mixed precision, one group", steps=train(), shard=buffers_follow,
             plain=shards.mixed_by_hand(POLICIES["bf16, reduce fp32"])),
    Scenario(name="bf16 module", model=bf16_model, shard=shards.blocks(1),
             steps=train(inputs=lambda run, step: run.batch(step).to(BF16))),
    Scenario(name="bf16 module, reduce fp32", model=bf16_model, like_plain=False,
             shard=shards.blocks(1, mp_policy=MixedPrecisionPolicy(reduce_dtype=FP32)),
             steps=train(inputs=lambda run, step: run.batch(step).to(BF16))),
    Scenario(name="fp64 module", model=lambda: models.Stack().double(), shard=shards.blocks(1),
             steps=train(inputs=lambda run, step: run.batch(step).double())),
    # Offload
    Scenario(name="offload", steps=train(), shard=shards.blocks(1, offload_policy=OFFLOAD)),
    Scenario(name="offload, kept after forward", steps=train(),
             shard=shards.blocks(1, offload_policy=OFFLOAD, reshard_after_forward=False)),
    Scenario(name="offload, accumulation", steps=train(micro=3),
             shard=shards.blocks(1, offload_policy=OFFLOAD)),
    Scenario(name="offload, hsdp (2, 1)", steps=train(), world=2, replicas=2,
             shard=shards.blocks(2, 1, offload_policy=OFFLOAD)),
    Scenario(name="offload, bf16", steps=train(), like_plain=False,
             shard=shards.blocks(1, offload_policy=OFFLOAD,
                                 mp_policy=POLICIES["bf16, reduce fp32"])),
    # Frozen
    Scenario(name="frozen block", prepare=freeze_block, shard=shards.blocks(1), steps=train()),
    Scenario(name="mixed-frozen groups", prepare=freeze_some, shard=shards.blocks(1),
             steps=train()),
    Scenario(name="mixed-frozen, bf16", prepare=freeze_some, like_plain=False, steps=train(),
             shard=shards.blocks(1, mp_policy=POLICIES["bf16, reduce fp32"])),
    Scenario(name="all frozen but the head", prepare=freeze_all_but_head, shard=shards.blocks(1),
             steps=train()),
    Scenario(name="frozen after the first step", shard=shards.blocks(1),
             steps=train(before=freeze_later, optimizer=sgd)),
    Scenario(name="mixed-frozen, hsdp (2, 1)", prepare=freeze_some, world=2, replicas=2,
             shard=shards.blocks(2, 1), steps=train()),
    # Tied and shared
    Scenario(name="tied embedding in one group", model=models.Tied, shard=shards.blocks(1),
             steps=train(inputs=tokens)),
    Scenario(name="tied embedding, modules grouped", model=models.Tied, shard=tied_in_group,
             steps=train(inputs=tokens)),
    Scenario(name="tied embedding, bf16", model=models.Tied, like_plain=False,
             shard=shards.blocks(1, mp_policy=POLICIES["bf16, reduce fp32"]),
             steps=train(inputs=tokens)),
    Scenario(name="shared block", model=models.Shared, shard=shared_block, steps=train(),
             comm_mode=False),
    Scenario(name="shared block, one group", model=models.Shared, shard=shards.root(1),
             steps=train(), comm_mode=False),
    # Ignored
    Scenario(name="ignored head", shard=without_head, steps=train(), needs=("ignored_params",)),
    Scenario(name="ignored parameters in a block", shard=ignored_in_block, steps=train(),
             needs=("ignored_params",)),
    # Odd sizes
    Scenario(name="odd sizes", model=Odd, shard=shards.blocks(1), steps=train()),
    Scenario(name="odd sizes, hsdp (2, 1)", model=Odd, world=2, replicas=2,
             shard=shards.blocks(2, 1), steps=train()),
    # Meta device
    Scenario(name="meta device, to_empty and reset", model=meta_model, shard=meta_sharded,
             plain=materialize, steps=train()),
    Scenario(name="meta device, loaded", model=meta_model, shard=loaded_onto_meta(False),
             plain=loaded_onto_meta(False), steps=train()),
    Scenario(name="meta device, loaded by assignment", model=meta_model,
             shard=loaded_onto_meta(True), plain=loaded_onto_meta(True), steps=train()),
]  # fmt: skip


@arm_tests(SCENARIOS)
def test_scenario(scenario: Scenario, arm: str, ledger) -> None:
    ledger.judge(scenario, arm)
