"""A scenario and the arms it runs in.

plain     the module with no FSDP2 (other parallelisms stay)
stock     FSDP2 as torch ships it
plugin    FSDP2 with fsdp_skip1 on
copying   the same with ``zero_copy=False``

All arms of a scenario run one after the other in the same ranks, from the same seeds. What a run
records is turned into bytes at once, so that later in-place changes cannot reach it, and compared
in the parent.
"""

import contextlib
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from support import models
from support.counting import Counts, counting
from support.ranks import Rank

PLAIN, STOCK, PLUGIN, COPYING = "plain", "stock", "plugin", "copying"
FSDP_ARMS = (STOCK, PLUGIN, COPYING)
PLUGIN_ARMS = (PLUGIN, COPYING)


@dataclass(frozen=True)
class Image:
    """One recorded value, to the bit. ``layout`` is compared between FSDP2 arms only."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes
    layout: str = ""

    @staticmethod
    def of(value: Any) -> "Image":
        if not isinstance(value, torch.Tensor):
            return Image(type(value).__name__, (), repr(value).encode())
        layout = "plain"
        tensor = value.detach()
        if isinstance(tensor, DTensor):
            layout = f"DTensor{tuple(map(str, tensor.placements))}{tuple(tensor.shape)}"
            tensor = tensor.to_local()
        if hasattr(tensor, "wait") and type(tensor) is not torch.Tensor:
            tensor = tensor.wait()  # an asynchronous collective's result
        layout += f" contiguous={tensor.is_contiguous()} grad={value.requires_grad}"
        if hasattr(tensor, "dense"):
            tensor = tensor.dense()  # an extension's tensor subclass (models.py)
        tensor = tensor.contiguous().cpu().clone()  # numpy would pin down the storage it sees
        data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        return Image(str(tensor.dtype), tuple(tensor.shape), data, layout)

    def tensor(self) -> torch.Tensor:
        dtype = getattr(torch, self.dtype.split(".")[1])
        return torch.frombuffer(bytearray(self.data), dtype=dtype).reshape(self.shape)

    def differs(self, other: "Image", layout: bool) -> str:
        """Says how ``self`` differs from ``other``; empty when it does not."""
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return f"{self.dtype}{self.shape} instead of {other.dtype}{other.shape}"
        if self.data != other.data:
            if not self.dtype.startswith("torch."):
                return f"{self.data.decode()} instead of {other.data.decode()}"
            a, b = self.tensor(), other.tensor()
            apart = (a != b).sum().item()
            gap = (a.double() - b.double()).abs().max().item()
            return f"{apart} of {a.numel()} elements apart, by up to {gap:.3g}"
        if layout and self.layout != other.layout:
            return f"{self.layout} instead of {other.layout}"
        return ""


@dataclass
class Outcome:
    """What one arm left behind in one rank."""

    records: dict[str, Image] = field(default_factory=dict)
    counts: dict[str, Counts] = field(default_factory=dict)
    error: str = ""
    #: What the plugin said that it skipped; None where it was not loaded (tests/ecosystem).
    skipped: dict[str, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One thing that a user does with FSDP2, small enough to run in a fraction of a second."""

    name: str
    #: Builds the module; called under the same seed in every arm.
    model: Callable[[], nn.Module] = models.stack
    #: What happens to the module in every arm (tensor parallelism, checkpoint wrappers, ...).
    prepare: Callable[["Run"], None] | None = None
    #: Applies FSDP2; None leaves it to the steps.
    shard: Callable[["Run"], None] | None = None
    #: Applied in the plain arm alone (DDP, mixed precision by hand, ...).
    plain: Callable[["Run"], None] | None = None
    steps: Callable[["Run"], None]
    world: int = 1
    #: Features (see ``features``) without which the scenario is skipped.
    needs: tuple[str, ...] = ()
    #: Stock equals plain bit for bit. False where no plain module can say the same.
    like_plain: bool = True
    #: The name of the fault (see ``faults``) that makes stock wrong here.
    fault: str = ""
    #: True: no group shards over more than one rank, so no collective may be left. False: all
    #: do, so nothing may change. None: groups of both kinds; the steps look for themselves.
    size_one: bool | None = True
    #: The plain arm averages its gradients over this many ranks, as DDP does.
    replicas: int = 1
    #: Arms that run; plain is left out where ``like_plain`` is False.
    arms: tuple[str, ...] = FSDP_ARMS
    timeout: float = 60.0
    #: CommDebugMode's module hooks do not live with every feature (torch.compile, for one).
    comm_mode: bool = True

    def all_arms(self) -> tuple[str, ...]:
        return ((PLAIN,) if self.like_plain or self.fault else ()) + self.arms


class Run:
    """One arm of a scenario in one rank: what the scenario's functions work with."""

    def __init__(self, scenario: Scenario, arm: str, rank: Rank, directory: Path):
        self.scenario = scenario
        self.arm = arm
        self.rank, self.world = rank.rank, rank.world
        self.directory = directory
        self.outcome = Outcome()
        self.module: nn.Module
        self.forward: Callable[..., Any]
        self.optimizer: torch.optim.Optimizer
        self.kept: dict[str, Any] = {}

    @property
    def fsdp(self) -> bool:
        return self.arm != PLAIN

    @property
    def plugin(self) -> bool:
        return self.arm in PLUGIN_ARMS

    # - Set-up
    def setup(self) -> None:
        seed_everything()
        self.module = self.scenario.model()
        self.forward = self.module
        if self.scenario.prepare:
            self.scenario.prepare(self)
        if self.fsdp:
            if self.scenario.shard:
                self.scenario.shard(self)
        elif self.scenario.plain:
            self.scenario.plain(self)
        seed_everything()

    def mesh(self, *shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
        return make_mesh(shape, names)

    def fully_shard(self, *modules: nn.Module, **kwargs: Any) -> None:
        """Shards bottom-up in the order given."""
        for module in modules:
            fully_shard(module, **kwargs)

    def fsdp_modules(self) -> list[FSDPModule]:
        return [m for m in self.module.modules() if isinstance(m, FSDPModule)]

    def batch(self, step: int, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """This rank's input for a step: the same in every arm."""
        generator = torch.Generator().manual_seed(1009 * step + self.data_rank)
        return torch.randn(*(shape or (4, models.DIM)), generator=generator, dtype=dtype)

    @property
    def data_rank(self) -> int:
        """Ranks that are no replicas of one another read the same data."""
        if self.scenario.replicas > 1:
            return self.rank * self.scenario.replicas // self.world
        return self.rank if not self.scenario.size_one else 0

    # - What is observed
    def record(self, key: str, value: Any) -> None:
        assert key not in self.outcome.records, f"{key} recorded twice"
        self.outcome.records[key] = Image.of(value)

    def record_all(self, prefix: str, values: dict[str, Any]) -> None:
        for key, value in values.items():
            if value is not None:
                self.record(f"{prefix}/{key}", value)

    def record_parameters(self, prefix: str) -> None:
        self.record_all(f"{prefix}/param", dict(self.module.named_parameters()))
        self.record_all(f"{prefix}/buffer", dict(self.module.named_buffers()))

    def record_gradients(self, prefix: str) -> None:
        grads = {name: p.grad for name, p in self.module.named_parameters()}
        self.record_all(f"{prefix}/grad", grads)

    def record_states(self, prefix: str) -> None:
        """What other methods, debuggers and trackers read from a parameter group."""
        if not self.fsdp:
            return
        for index, group in enumerate(param_groups(self.module)):
            state = (
                group._sharded_state.name,
                group._training_state.name,
                group._all_gather_result is None,
                [p.sharded_state.name for p in group.fsdp_params],
            )
            self.record(f"fsdp/{prefix}/group {index}", str(state))

    @contextlib.contextmanager
    def count(self, key: str) -> Iterator[None]:
        """Adds the region's counts to those under ``key``."""
        with counting(comms=self.scenario.comm_mode) as counts:
            yield
        self.outcome.counts.setdefault(key, Counts()).add(counts)

    # - Toggles: in the plugin arms only, so that the reference never changes
    def toggle(self, on: bool) -> None:
        if not self.plugin:
            return
        import fsdp_skip1

        if on:
            fsdp_skip1.enable(zero_copy=self.arm == PLUGIN)
            assert fsdp_skip1.is_enabled()
        else:
            fsdp_skip1.disable()
            assert not fsdp_skip1.is_enabled()


def seed_everything() -> None:
    random.seed(7)
    torch.manual_seed(7)


_MESHES: dict[Any, DeviceMesh] = {}


def make_mesh(shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Arms share a mesh: new process groups for each would cost and change nothing."""
    if names is None and len(shape) > 1:
        names = ("replicate", "shard")
    key = (shape, names)
    if key not in _MESHES:
        _MESHES[key] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return _MESHES[key]


def param_groups(module: nn.Module) -> list[Any]:
    """All FSDP2 parameter groups under ``module``, on every release."""
    groups, seen = [], set()
    for submodule in module.modules():
        if not isinstance(submodule, FSDPModule):
            continue
        state = submodule._get_fsdp_state()
        if id(state) in seen:
            continue
        seen.add(id(state))
        if hasattr(state, "_fsdp_param_groups"):
            groups += list(state._fsdp_param_groups)
        elif state._fsdp_param_group is not None:
            groups.append(state._fsdp_param_group)
    return groups


@contextlib.contextmanager
def _arm_context(arm: str) -> Iterator[None]:
    if arm in PLUGIN_ARMS:
        import fsdp_skip1

        with contextlib.ExitStack() as stack:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                stack.enter_context(fsdp_skip1.enabled(zero_copy=arm == PLUGIN))
            why = "; ".join(str(warning.message) for warning in said)
            assert fsdp_skip1.is_enabled(), f"the plugin is not on: {why}"
            yield
    elif "fsdp_skip1" in sys.modules:
        with sys.modules["fsdp_skip1"].disabled():
            yield
    else:  # torch as it is, with nothing of ours loaded
        yield


def run_arms(scenario: Scenario, rank: Rank) -> dict[str, Outcome]:
    """Body of a forked rank."""
    outcomes: dict[str, Outcome] = {}
    for arm in scenario.all_arms():
        directory = rank.directory / arm
        directory.mkdir(exist_ok=True)
        run = Run(scenario, arm, rank, directory)
        outcomes[arm] = run.outcome
        try:
            with _arm_context(arm):
                run.setup()
                scenario.steps(run)
        except Exception:
            run.outcome.error = traceback.format_exc()
        _vote(rank, arm, run.outcome.error)
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        del run
    return outcomes


def _vote(rank: Rank, arm: str, error: str) -> None:
    """After an error, goes on to the next arm only if every rank failed alike.

    One rank alone in trouble leaves its peers inside a collective; then nothing is left but to
    end, and the parent ends the others.
    """
    if rank.world == 1:
        return
    rank.store.set(f"{arm}/{rank.rank}", "error" if error else "fine")
    votes = set()
    for other in range(rank.world):
        key = f"{arm}/{other}"
        if error:
            from datetime import timedelta

            try:
                rank.store.wait([key], timedelta(seconds=2))
            except Exception:
                raise RuntimeError(f"arm {arm} failed in this rank alone:\n{error}") from None
        votes.add(rank.store.get(key))
    if len(votes) > 1:
        raise RuntimeError(f"arm {arm} failed in some ranks only:\n{error or 'not in this one'}")


def average_gradients(module: nn.Module, replicas: int) -> None:
    """What DDP does, by hand, over all ranks."""
    for parameter in module.parameters():
        if parameter.grad is not None:
            dist.all_reduce(local(parameter.grad))
            local(parameter.grad).div_(replicas)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
