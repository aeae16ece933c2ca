"""The arms: one model, trained in each of the ways that are compared.

A step is a forward and a backward. Optimizers run outside of it, on purpose: an optimizer over
DTensors costs the same with the plugin and without, and it would drown what is measured.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

import fsdp_skip1
from fsdp_skip1.bench import BenchError
from fsdp_skip1.bench.models import SIZES, ByteModel

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fsdp_skip1.bench.data import Batches
    from fsdp_skip1.bench.options import Options

LEARNING_RATE = 0.02


class Trainer:
    """One arm at work: its own model, and its own count of steps taken.

    Args:
        name: Short name.
        title: Name for people.
        reference: Name of the arm whose losses it must repeat.
        wrap: Makes the model ready to train.
        setting: Has the plugin on or off, around all that this arm does.
        options: Device and dtypes.
        model: Name of the model.
        batches: What to train on.
    """

    def __init__(
        self,
        name: str,
        title: str,
        reference: str,
        wrap: Callable[[ByteModel], nn.Module],
        setting: Callable[[], AbstractContextManager[Any]],
        options: Options,
        model: str,
        batches: Batches,
    ) -> None:
        self.name = name
        self.title = title
        self.reference = reference
        self.setting = setting
        self.losses: list[str] = []
        self.failure: str | None = None
        self._batches = batches
        with self.setting():
            built = SIZES[model].build().to(getattr(torch, options.dtype))
            self.module = wrap(built)
        self._weights = Weights(self.module, options)
        self.batch = batches[0]

    def step(self) -> Tensor:
        """Forward and backward: what is timed."""
        tokens, targets = self.batch
        logits = self.module(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets)
        loss.backward()
        return loss

    def finish(self, loss: Tensor) -> None:
        """What belongs to training and not to the timed step."""
        self.losses.append(loss.item().hex())
        self._weights.update()
        self.batch = self._batches[len(self.losses)]


class Weights:
    """The optimizer; and for arms without FSDP2, the full-precision weights that FSDP2 would keep.

    With mixed precision or offloading, the plain module computes with parameters that are already
    in the right dtype and place, and the casts happen here, untimed. So it is the lower bound, its
    losses are still the same, and the casts that FSDP2 runs in its steps show as its own.
    """

    def __init__(self, module: nn.Module, options: Options) -> None:
        self._pairs: list[tuple[nn.Parameter, Tensor]] = []
        self._reduce = getattr(torch, options.reduce_dtype) if options.reduce_dtype else None
        parameters = list(module.parameters())
        if is_plain(module) and (options.param_dtype or options.reduce_dtype or options.offload):
            home = torch.device("cpu") if options.offload else None
            for parameter in parameters:
                master = parameter.detach().to(home, copy=True)
                self._pairs.append((parameter, master))
                if options.param_dtype:
                    parameter.data = parameter.data.to(getattr(torch, options.param_dtype))
            parameters = [master for _, master in self._pairs]
        self._optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE)

    def update(self) -> None:
        """Take an optimizer step."""
        for parameter, master in self._pairs:
            assert parameter.grad is not None
            grad = parameter.grad.to(self._reduce) if self._reduce else parameter.grad
            master.grad = grad.to(master.device, master.dtype)
            parameter.grad = None
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for parameter, master in self._pairs:
                parameter.copy_(master)


def is_plain(module: nn.Module) -> bool:
    """Whether FSDP2 has nothing to do with this module."""
    return not hasattr(module, "unshard")


def build(options: Options, model: str, device: torch.device, batches: Batches) -> list[Trainer]:
    """All arms of a run; the first is the baseline."""
    world = dist.get_world_size()
    mixed = MixedPrecisionPolicy(
        param_dtype=getattr(torch, options.param_dtype) if options.param_dtype else None,
        reduce_dtype=getattr(torch, options.reduce_dtype) if options.reduce_dtype else None,
    )
    if options.offload:
        offload: OffloadPolicy = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    else:
        offload = OffloadPolicy()
    policies = {"mp_policy": mixed, "offload_policy": offload}

    def plain(module: ByteModel) -> nn.Module:
        return module.to(device)

    def ddp(module: ByteModel) -> nn.Module:
        # Buffers are constants here, and FSDP2 does not broadcast them either.
        known = inspect.signature(DistributedDataParallel).parameters
        sync = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        return DistributedDataParallel(module.to(device), **{sync: False})

    def shard(module: ByteModel) -> nn.Module:
        if world == 1:
            mesh = init_device_mesh(device.type, (1,), mesh_dim_names=("shard",))
        else:
            names = ("replicate", "shard")
            mesh = init_device_mesh(device.type, (world, 1), mesh_dim_names=names)
        module = module.to(device)
        for block in module.blocks:
            fully_shard(block, mesh=mesh, **policies)
        fully_shard(module, mesh=mesh, **policies)
        prefetch(module)
        return module

    def prefetch(module: ByteModel) -> None:
        blocks = list(module.blocks)
        for number, block in enumerate(blocks if options.prefetch else ()):
            behind = blocks[number + 1 : number + 1 + options.prefetch]
            before = blocks[max(0, number - options.prefetch) : number]
            block.set_modules_to_forward_prefetch(behind)
            block.set_modules_to_backward_prefetch(before[::-1])

    def replicas(module: ByteModel) -> nn.Module:
        replicate = find_replicate()
        assert replicate is not None
        mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("replicate",))
        module = module.to(device)
        for block in module.blocks:
            replicate(block, mesh=mesh, **policies)
        replicate(module, mesh=mesh, **policies)
        prefetch(module)
        return module

    def arm(
        name: str,
        title: str,
        reference: str,
        wrap: Callable[[ByteModel], nn.Module],
        setting: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> Trainer:
        return Trainer(name, title, reference, wrap, setting, options, model, batches)

    stock = fsdp_skip1.disabled
    if world == 1:
        return [
            arm("plain", "plain module", "plain", plain),
            arm("stock", "stock FSDP2", "plain", shard, stock),
            arm("plugin", "fsdp_skip1", "plain", shard, switched_on),
        ]
    # More than two summands, or two in another dtype, round as the reduction happens to order
    # them; then stock is the one to agree with.
    exact = world == 2 and not (options.param_dtype or options.reduce_dtype)
    shape = f"({world}, 1)"
    arms = [
        arm("ddp", "DDP", "ddp", ddp),
        arm("hsdp-stock", f"{shape} stock", "ddp" if exact else "hsdp-stock", shard, stock),
        arm(
            "hsdp-plugin",
            f"{shape} fsdp_skip1",
            "ddp" if exact else "hsdp-stock",
            shard,
            switched_on,
        ),
    ]
    if find_replicate():
        reference = "ddp" if exact else "replicate-stock"
        arms += [
            arm("replicate-stock", "replicate() stock", reference, replicas, stock),
            arm("replicate-plugin", "replicate() fsdp_skip1", reference, replicas, switched_on),
        ]
    return arms


def switched_on() -> AbstractContextManager[Any]:
    """The plugin on, or the reason why it is not: an arm must be what its name says."""
    if not fsdp_skip1.is_enabled():
        with fsdp_skip1.enabled() as on:
            if not on:
                raise BenchError(
                    "fsdp_skip1 does not switch on here: FSDP_SKIP1=0 is set, or it does not "
                    f"understand torch {torch.__version__} (its warning says which)"
                )
    return fsdp_skip1.enabled()


def find_replicate() -> Callable[..., Any] | None:
    """`replicate()` where it is built on FSDP2: torch 2.10 and later."""
    try:
        from torch.distributed._composable.replicate_with_fsdp import replicate
    except ImportError:
        return None
    return replicate if "mp_policy" in inspect.signature(replicate).parameters else None
