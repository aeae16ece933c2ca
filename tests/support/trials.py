"""Runs something that a user does with FSDP2 on the stand-in device, and says what happened."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import fsdp_skip1
from support import models
from support.arms import local, make_mesh, param_groups, seed_everything
from support.ranks import Rank
from support.steps import loss_of
from support.streams import COMPUTE, TO_DEVICE, Device, Kernel


@dataclass(frozen=True)
class Memory:
    """The storages of one parameter group."""

    host: frozenset[int]
    buffers: frozenset[int]
    nbytes: int  # on the host
    params: int


@dataclass
class Report:
    """What happened on the device of one rank."""

    races: list[str]
    sites: dict[str, Counter[str]]
    host_waits: Counter[str]
    kernels: list[Kernel]
    phases: dict[str, slice]
    groups: list[Memory]  # in the order of ``named_modules``: the root comes first
    peak: int
    left: int
    staging_peak: int
    staging_left: int
    values: list[bytes]

    def transfers(self, group: int, phase: str) -> list[Kernel]:
        """Copies from the host of a group's parameters."""
        return [
            k
            for k in self.kernels[self.phases[phase]]
            if k.kind == TO_DEVICE and k.touches(self.groups[group].host)
        ]

    def computes(self, group: int, phase: str) -> list[Kernel]:
        """What reads a group's unsharded parameters."""
        buffers = self.groups[group].buffers
        return [
            k
            for k in self.kernels[self.phases[phase]]
            if k.kind == COMPUTE and not buffers.isdisjoint(k.reads)
        ]


class Trial:
    """One model on the stand-in device, for the functions that drive it."""

    def __init__(self, case: "Case", device: Device, rank: Rank, plugin: bool) -> None:
        self.case, self.device, self.rank, self.plugin = case, device, rank, plugin
        self.phases: dict[str, slice] = {}
        seed_everything()
        self.module = case.model()
        mesh = make_mesh(case.mesh)
        for block in self.module.blocks:
            fully_shard(block, mesh=mesh, **case.options)
        fully_shard(self.module, mesh=mesh, **case.options)
        device.take(self.module)
        self.optimizer = torch.optim.SGD(
            self.module.parameters(), lr=0.05, momentum=0.9, foreach=False
        )

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = len(self.device.kernels)
        yield
        self.phases[name] = slice(start, len(self.device.kernels))

    def batch(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step + 97 * self.rank.rank)
        return torch.randn(4, models.DIM, generator=generator)

    def forward(self, step: int) -> torch.Tensor:
        with self.phase(f"forward {step}"):
            return loss_of(self.module(self.batch(step)))

    def backward(self, step: int) -> None:
        loss = self.forward(step)
        with self.phase(f"backward {step}"):
            loss.backward()

    def switch(self, on: bool) -> None:
        """Where it is being tried, the plugin goes on or off."""
        if self.plugin and on:
            fsdp_skip1.enable(zero_copy=self.case.zero_copy)
        elif self.plugin:
            fsdp_skip1.disable()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def report(self) -> Report:
        device = self.device
        left = device.collect()
        stream = param_groups(self.module)[0].comm_ctx.all_gather_copy_in_stream.stream_id
        return Report(
            races=list(dict.fromkeys(device.races)),
            sites=device.sites,
            host_waits=device.host_waits,
            kernels=device.kernels,
            phases=self.phases,
            groups=[_memory(group) for group in param_groups(self.module)],
            peak=device.peak,
            left=left,
            staging_peak=device.peak_of[stream],
            staging_left=device.live_of[stream],
            values=[_bytes(p) for p in self.module.parameters()],
        )


def train(trial: Trial) -> None:
    for step in range(2):
        trial.backward(step)
        trial.update()


@dataclass(frozen=True, kw_only=True)
class Case:
    """Something that a user does."""

    name: str
    model: Callable[[], nn.Module] = partial(models.Stack, depth=3)
    options: dict[str, Any] = field(default_factory=dict)  # of ``fully_shard``
    mesh: tuple[int, ...] = (1,)
    drive: Callable[[Trial], None] = train
    world: int = 1
    zero_copy: bool = True
    needs: tuple[str, ...] = ()
    stock: bool = True  # run it, too, and compare
    in_vain: bool = False  # something is transferred that nobody waits for

    def run(self, rank: Rank, *, plugin: bool = True, **faults: Any) -> Report:
        """Call it in a forked rank."""
        make_mesh(self.mesh)  # with tensors of its own, that nobody should count
        with Device(**faults) as device:
            switched = fsdp_skip1.enabled(zero_copy=self.zero_copy)
            with switched if plugin else fsdp_skip1.disabled():
                trial = Trial(self, device, rank, plugin)
                self.drive(trial)
                trial.module.reshard()
                return trial.report()


def _memory(group: Any) -> Memory:
    host, buffers, nbytes = set(), set(), 0
    for fsdp_param in group.fsdp_params:
        data = _dense(fsdp_param._sharded_param_data)
        host.add(data.untyped_storage()._cdata)
        nbytes += data.nbytes
        unsharded = [_dense(fsdp_param._unsharded_param)] * hasattr(fsdp_param, "_unsharded_param")
        for tensor in (*fsdp_param.all_gather_outputs, *unsharded):
            buffers.add(tensor.untyped_storage()._cdata)
    return Memory(frozenset(host), frozenset(buffers), nbytes, len(group.fsdp_params))


def _bytes(parameter: nn.Parameter) -> bytes:
    tensor = _dense(local(parameter.detach())).contiguous()
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.dense() if hasattr(tensor, "dense") else tensor
