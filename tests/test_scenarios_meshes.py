"""Every mesh whose shard dimension has one rank, and modules with groups of both kinds."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from support import models, shards
from support.arms import Run, Scenario
from support.results import arm_tests
from support.steps import sgd, tokens, train

pytestmark = pytest.mark.scenario


# - Tensor parallelism beside a shard mesh of size 1


def tensor_parallel(*mesh_shape: int, names: tuple[str, ...], sequence: bool = False):
    def prepare(run: Run) -> None:
        mesh = run.mesh(*mesh_shape, names=names)["tp"]
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        if sequence:
            plan = {
                "norm": SequenceParallel(sequence_dim=0),
                "up": ColwiseParallel(input_layouts=Shard(0)),
                "down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
            }
        for block in run.module.blocks:
            parallelize_module(block, mesh, plan)
        if sequence:
            first, last = run.module.blocks[0], run.module.blocks[-1]
            first.register_forward_pre_hook(lambda module, x: shard_rows(mesh, x[0]))
            last.register_forward_hook(lambda module, x, y: gather_rows(y))
        run.kept["mesh"] = run.mesh(*mesh_shape, names=names)

    return prepare


def shard_rows(mesh, x):
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(x, mesh, [Replicate()]).redistribute(placements=[Shard(0)])


def gather_rows(y):
    return y.redistribute(placements=[Replicate()]).to_local()


def beside_tp(*dims: str, **kwargs):
    def shard(run: Run) -> None:
        mesh = run.kept["mesh"]
        data = mesh[dims if len(dims) > 1 else dims[0]]
        for block in run.module.blocks:
            fully_shard(block, mesh=data, **kwargs)
        fully_shard(run.module, mesh=data, **kwargs)

    return shard


def tp_model() -> nn.Module:
    """All inside blocks is parallelized; the head is not."""
    return models.Stack(depth=2, hidden=12)


# - Shard placements and per-parameter meshes


def last_dim(parameter: nn.Parameter) -> Shard | None:
    return Shard(parameter.ndim - 1)


def some_on_dim_one(parameter: nn.Parameter) -> Shard | None:
    return Shard(-1) if parameter.ndim == 2 and parameter.shape[0] > 8 else None


def per_parameter(matrices: tuple, others: tuple):
    """2-D parameters on one mesh, the others on another; meshes are (sizes, names, dim)."""

    def shard(run: Run) -> None:
        from torch.distributed.fsdp._fully_shard._fsdp_common import (
            FSDPMeshInfo,
            ShardPlacementResult,
        )

        meshes = [run.mesh(*sizes, names=names)[dim] for sizes, names, dim in (matrices, others)]
        info = FSDPMeshInfo(meshes[0], 0)  # one object for each process group

        def place(parameter: nn.Parameter):
            return ShardPlacementResult(Shard(0), info) if parameter.ndim == 2 else None

        for block in run.module.blocks:
            fully_shard(block, mesh=meshes[1], shard_placement_fn=place)
        fully_shard(run.module, mesh=meshes[1], shard_placement_fn=place)

    return shard


def grouped(run: Run) -> None:
    fully_shard(list(run.module.blocks), mesh=run.mesh(1))
    fully_shard(run.module, mesh=run.mesh(1))


def grouped_norm_and_head(run: Run) -> None:
    mesh = run.mesh(1)
    for block in run.module.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard([run.module.norm, run.module.head], mesh=mesh, reshard_after_forward=False)
    fully_shard(run.module, mesh=mesh)


def nested(run: Run) -> None:
    mesh = run.mesh(1)
    for side in (run.module.left, run.module.right):
        fully_shard(side.blocks[0].up, mesh=mesh)
        fully_shard(side.blocks[0], mesh=mesh)
        fully_shard(side, mesh=mesh)
    fully_shard(run.module, mesh=mesh)


def inner_only(run: Run) -> None:
    """The root is no FSDP module: each block is a root of its own."""
    for block in run.module.blocks:
        fully_shard(block, mesh=run.mesh(1))


def singleton_experts(run: Run) -> None:
    """Experts on a mesh of their own of size 1, the rest sharded over both ranks."""
    mesh = run.mesh(2, 1, names=("data", "expert"))
    fully_shard(run.module.blocks[0], mesh=mesh["expert"])
    fully_shard(run.module.blocks[1], mesh=mesh["data"])
    fully_shard(run.module, mesh=mesh["data"])


def own_context(run: Run) -> None:
    """Two roots that share streams and prefetch order."""
    from torch.distributed.fsdp import share_comm_ctx

    mesh = run.mesh(1)
    for side in (run.module.left, run.module.right):
        fully_shard(side.blocks[0], mesh=mesh)
        fully_shard(side, mesh=mesh)
    share_comm_ctx([run.module.left, run.module.right])


def spmd_parameters(run: Run) -> None:
    """Every parameter a DTensor on the whole mesh; FSDP2 is told which dimension is its own."""
    from torch.distributed.tensor import distribute_module

    mesh = run.mesh(1, 1, names=("shard", "tp"))
    run.kept["mesh"] = mesh
    distribute_module(run.module, mesh)


def spmd_batch(run: Run, step: int) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    mesh = run.kept["mesh"]
    return DTensor.from_local(run.batch(step), mesh, [Replicate()] * mesh.ndim)


def spmd_shard(run: Run) -> None:
    from torch.distributed.fsdp import DataParallelMeshDims

    options = {"mesh": run.kept["mesh"], "dp_mesh_dims": DataParallelMeshDims(shard="shard")}
    for block in run.module.blocks:
        fully_shard(block, **options)
    fully_shard(run.module, **options)


SCENARIOS = [
    Scenario(
        name="default mesh of one rank",
        shard=shards.blocks(),
        steps=train(),
        needs=("cpu default mesh",),
    ),
    Scenario(name="1-d mesh", shard=shards.blocks(1), steps=train()),
    Scenario(name="1-d mesh, sgd", shard=shards.blocks(1), steps=train(optimizer=sgd)),
    Scenario(name="one group", shard=shards.root(1), steps=train()),
    Scenario(name="a group for each layer", model=models.linears, shard=shards.children(1),
             steps=train()),
    Scenario(name="blocks only", shard=inner_only, steps=train()),
    Scenario(name="nested three deep", model=models.Nested, shard=nested, steps=train()),
    Scenario(name="transformer", model=models.Transformer, shard=shards.blocks(1),
             steps=train(inputs=tokens)),
    Scenario(name="grouped blocks", shard=grouped, steps=train()),
    Scenario(name="grouped norm and head", model=models.Transformer, shard=grouped_norm_and_head,
             steps=train(inputs=tokens)),
    Scenario(name="two roots, one context", model=models.Nested, shard=own_context, steps=train(),
             needs=("share_comm_ctx",)),
    # HSDP
    Scenario(name="hsdp (1, 1)", shard=shards.blocks(1, 1), steps=train()),
    Scenario(name="hsdp (2, 1)", shard=shards.blocks(2, 1), steps=train(), world=2, replicas=2),
    Scenario(name="hsdp (2, 1), one group", shard=shards.root(2, 1), steps=train(), world=2,
             replicas=2),
    Scenario(name="hsdp (2, 1), accumulation", shard=shards.blocks(2, 1), steps=train(micro=3),
             world=2, replicas=2),
    # With four ranks a sum's order depends on where an element sits in the flat buffer, which no
    # plain module shares.
    Scenario(name="hsdp (4, 1)", shard=shards.blocks(4, 1), steps=train(), world=4, replicas=4,
             like_plain=False),
    # replicate()
    Scenario(name="replicate 1", shard=shards.replicated(1), steps=train(),
             needs=("replicate_with_fsdp",)),
    Scenario(name="replicate 2", shard=shards.replicated(2), steps=train(), world=2, replicas=2,
             needs=("replicate_with_fsdp",)),
    Scenario(name="replicate 2, accumulation", shard=shards.replicated(2), steps=train(micro=3),
             world=2, replicas=2, needs=("replicate_with_fsdp",)),
    Scenario(name="replicate 4", shard=shards.replicated(4), steps=train(), world=4, replicas=4,
             like_plain=False, needs=("replicate_with_fsdp",)),
    # Tensor parallelism
    Scenario(name="tp 2", model=tp_model, world=2, steps=train(),
             prepare=tensor_parallel(1, 2, names=("dp", "tp")), shard=beside_tp("dp")),
    Scenario(name="tp 2, kept after forward", model=tp_model, world=2, steps=train(),
             prepare=tensor_parallel(1, 2, names=("dp", "tp")),
             shard=beside_tp("dp", reshard_after_forward=False)),
    Scenario(name="tp 2, sequence parallel norm", model=tp_model, world=2, steps=train(),
             prepare=tensor_parallel(1, 2, names=("dp", "tp"), sequence=True),
             shard=beside_tp("dp")),
    Scenario(name="tp 2, accumulation", model=tp_model, world=2, steps=train(micro=3),
             prepare=tensor_parallel(1, 2, names=("dp", "tp")), shard=beside_tp("dp")),
    Scenario(name="tp 2, offload", model=tp_model, world=2, steps=train(),
             prepare=tensor_parallel(1, 2, names=("dp", "tp")),
             shard=beside_tp("dp", offload_policy=CPUOffloadPolicy(pin_memory=False))),
    Scenario(name="tp 1", model=tp_model, steps=train(),
             prepare=tensor_parallel(1, 1, names=("dp", "tp")), shard=beside_tp("dp")),
    Scenario(name="hsdp (2, 1) with tp 2", model=tp_model, world=4, steps=train(), replicas=2,
             like_plain=False, prepare=tensor_parallel(2, 1, 2, names=("rep", "dp", "tp")),
             shard=beside_tp("rep", "dp")),
    Scenario(name="spmd mesh", steps=train(inputs=spmd_batch), prepare=spmd_parameters,
             shard=spmd_shard, needs=("dp_mesh_dims",)),
    # Placements
    Scenario(name="sharded on the last dim", steps=train(),
             shard=shards.blocks(1, shard_placement_fn=last_dim)),
    Scenario(name="some sharded on dim 1", steps=train(),
             shard=shards.blocks(1, shard_placement_fn=some_on_dim_one)),
    Scenario(name="hsdp (2, 1) sharded on the last dim", steps=train(), world=2, replicas=2,
             shard=shards.blocks(2, 1, shard_placement_fn=last_dim)),
    Scenario(name="per-parameter meshes, all of size 1", steps=train(), world=2,
             needs=("per-parameter meshes",),
             shard=per_parameter(((2, 1, 1), ("a", "b", "c"), "b"),
                                 ((2, 1, 1), ("a", "b", "c"), "c"))),
    Scenario(name="per-parameter meshes of both kinds", steps=train(), world=2, like_plain=False,
             size_one=None, needs=("per-parameter meshes",),
             shard=per_parameter(((2, 1), ("a", "b"), "b"), ((2, 1), ("a", "b"), "a"))),
    Scenario(name="per-parameter meshes of both kinds, swapped", steps=train(), world=2,
             like_plain=False, size_one=None, needs=("per-parameter meshes",),
             shard=per_parameter(((2, 1), ("a", "b"), "a"), ((2, 1), ("a", "b"), "b"))),
    Scenario(name="experts on a singleton mesh", steps=train(), world=2, like_plain=False,
             size_one=None, shard=singleton_experts),
]  # fmt: skip


@arm_tests(SCENARIOS)
def test_scenario(scenario: Scenario, arm: str, ledger) -> None:
    ledger.judge(scenario, arm)


@pytest.mark.parametrize(
    "name",
    [s.name for s in SCENARIOS if s.size_one is None],
)
def test_only_the_larger_groups_communicate(name: str, ledger) -> None:
    """Groups of both kinds in one module: only those of the sharded ones communicate."""
    scenario = next(s for s in SCENARIOS if s.name == name)
    from support.features import missing

    if lacks := missing(scenario.needs):
        pytest.skip(f"this torch has no {lacks}")
    for outcomes in ledger.outcomes(scenario):
        ours, stock = (outcomes[arm].counts["step"] for arm in ("plugin", "stock"))
        assert 0 < ours.all_gathers <= stock.all_gathers
        assert 0 < ours.reduce_scatters <= stock.reduce_scatters
        assert ours.ops["fsdp::split_with_sizes_copy"] == ours.all_gathers


def test_torch_is_single_threaded() -> None:
    """Ranks are forked: a thread in the parent would not survive it."""
    assert torch.get_num_threads() == 1
