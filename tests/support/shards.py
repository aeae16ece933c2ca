"""Ways to apply FSDP2 (and its neighbours) to the modules of ``models``."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from support.arms import Run

Apply = Callable[[Run], None]


def blocks(*mesh: int, root: dict[str, Any] | None = None, **kwargs: Any) -> Apply:
    """``fully_shard`` on each block, then on the root; no sizes means the default mesh.

    ``root`` holds options for the root alone.
    """

    def apply(run: Run) -> None:
        options = dict(kwargs)
        if mesh:
            options["mesh"] = run.mesh(*mesh)
        shard_blocks(run.module, root, **options)

    return apply


def shard_blocks(module: nn.Module, root: dict[str, Any] | None = None, **options: Any) -> None:
    """``fully_shard`` on each block, then on the root, which may have options of its own."""
    for block in module.blocks:
        fully_shard(block, **options)
    fully_shard(module, **{**options, **(root or {})})


def children(*mesh: int, **kwargs: Any) -> Apply:
    """``fully_shard`` on each direct child, then on the root."""

    def apply(run: Run) -> None:
        options = {**kwargs, "mesh": run.mesh(*mesh)}
        for child in run.module.children():
            fully_shard(child, **options)
        fully_shard(run.module, **options)

    return apply


def root(*mesh: int, **kwargs: Any) -> Apply:
    """One group for the whole module."""

    def apply(run: Run) -> None:
        fully_shard(run.module, mesh=run.mesh(*mesh), **kwargs)

    return apply


def replicated(ranks: int, **kwargs: Any) -> Apply:
    """``replicate()`` built on FSDP2: a group with no shard dimension at all."""

    def apply(run: Run) -> None:
        from torch.distributed._composable.replicate_with_fsdp import replicate

        mesh = replicate_mesh(run, ranks)
        for block in run.module.blocks:
            replicate(block, mesh=mesh, **kwargs)
        replicate(run.module, mesh=mesh, **kwargs)

    return apply


def replicate_mesh(run: Run, ranks: int):
    """A 1-D mesh, or, where the release asks for it, the (ranks, 1) mesh it was first given."""
    from support.features import has

    if has("replicate mesh argument"):
        return run.mesh(ranks, names=("replicate",))
    return run.mesh(ranks, 1, names=("replicate", "shard"))


def ddp(run: Run) -> None:
    """The plain arm as DistributedDataParallel."""
    run.forward = nn.parallel.DistributedDataParallel(run.module)
    run.kept["ddp"] = True


def mixed_by_hand(policy: MixedPrecisionPolicy) -> Apply:
    """Mixed precision with no FSDP2: the module runs over casts of its own parameters.

    A cast's backward gives each gradient back in the parameter's dtype, which is what FSDP2
    does with one rank.
    """

    def apply(run: Run) -> None:
        module, dtype = run.module, policy.param_dtype

        def cast(x: Any, to: torch.dtype | None) -> Any:
            floating = isinstance(x, torch.Tensor) and x.is_floating_point()
            return x.to(to) if floating and to is not None else x

        def run_cast(*inputs: Any) -> Any:
            parameters = {name: cast(p, dtype) for name, p in module.named_parameters()}
            if policy.cast_forward_inputs:
                inputs = tuple(cast(x, dtype) for x in inputs)
            output = torch.func.functional_call(module, parameters, inputs)
            return cast(output, policy.output_dtype)

        run.forward = run_cast

    return apply
