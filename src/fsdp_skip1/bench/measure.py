"""Times, operators, bytes and traces of each arm.

Arms take turns in blocks of a few steps, because switching the plugin between two arms has a cost
that belongs to neither; the first steps of a block are not timed. Every round runs all arms, each
round in the other direction, and its times are compared within the round only, so that a machine
which gets slower or faster meanwhile spoils one round and not the result.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_skip1
from fsdp_skip1.bench import arms
from fsdp_skip1.bench.data import Batches
from fsdp_skip1.bench.models import SIZES
from fsdp_skip1.bench.results import Arm, Comparison, Spread
from fsdp_skip1.releases import groups_of

if TYPE_CHECKING:
    from fsdp_skip1.bench.arms import Trainer
    from fsdp_skip1.bench.options import Options

BLOCK = 5
"""Timed steps of one arm before the next arm's turn."""

WARM_UP = 4
"""Steps before those."""

ALLOCATORS = frozenset(
    ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_")
)
UNTOUCHED = ALLOCATORS | frozenset(("_unsafe_view", "_reshape_alias", "set_"))
"""Operators beside views that leave tensor data alone."""


def compare(
    options: Options, model: str, device: torch.device, progress: Callable[[], None]
) -> Comparison:
    """Measure all arms of one model. Every rank calls this; rank 0's answer is the result."""
    size = SIZES[model]
    batches = Batches(size.batch, size.length, dist.get_rank(), device)
    trainers = arms.build(options, model, device, batches)
    parameters = sum(p.numel() for p in trainers[0].module.parameters())
    for trainer in trainers:
        _try_out(trainer, required=trainer is trainers[0])
    working = [trainer for trainer in trainers if trainer.failure is None]
    gc.collect()
    gc.freeze()  # collections go on, but each arm pays for its own garbage only
    times: dict[str, list[float]] = {trainer.name: [] for trainer in working}
    shares: list[float] = []
    for block in _blocks(options.steps):
        for trainer in working if len(times[working[0].name]) % 2 == 0 else reversed(working):
            seconds, share = _block(trainer, block, device)
            times[trainer.name].append(seconds)
            if trainer is trainers[0]:
                shares.append(share)
            progress()
    gc.unfreeze()

    results = []
    baseline = trainers[0]
    base_ops, base_allocated, base_peak = Counter[str](), 0, 0
    for trainer in trainers:
        arm = Arm(trainer.name, trainer.title, trainer.reference, failure=trainer.failure)
        results.append(arm)
        if trainer.failure is not None:
            continue
        with trainer.setting():
            for _ in range(WARM_UP):
                trainer.finish(trainer.step())
            ops = _count(trainer)
            allocated, peak = _memory(trainer, device)
            if options.trace:
                _trace(trainer, device, options, model)
        if trainer is baseline:
            base_ops, base_allocated, base_peak = ops, allocated, peak
        arm.collectives = _collectives(ops)
        arm.data_ops = _beyond(_data_ops(ops), _data_ops(base_ops))
        arm.allocated, arm.peak = allocated - base_allocated, peak - base_peak
        arm.milliseconds = [1000 * seconds for seconds in times[trainer.name]]
        pairs = zip(times[trainer.name], times[baseline.name], strict=True)
        arm.ratio = Spread.of([ours / base for ours, base in pairs])
        arm.losses = _of_all_ranks(trainer.losses)
    # What waits for a GPU or for other ranks does not need the CPU all the time.
    alone = device.type == "cpu" and dist.get_world_size() == 1
    cpu_share = statistics.median(shares) if alone else None
    comparison = Comparison(model, parameters, size.batch * size.length, results, cpu_share)
    comparison.judge()
    return comparison


def wrapper_cost(device: torch.device) -> float:
    """What the plugin adds to a call on a group that is really sharded, in microseconds.

    Of a call that finds nothing to do, in torch, so that the difference stands out: the mean of
    ``unshard`` and ``wait_for_unshard``. Every rank calls this.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))
    module = fully_shard(nn.Linear(64, 64).to(device), mesh=mesh)
    calls = 2000
    rounds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * 9):
        on = number % 2 == 1
        with arms.switched_on() if on else fsdp_skip1.disabled():
            module(torch.ones(2, 64, device=device)).sum().backward()
            module.unshard()
            (group,) = groups_of(fully_shard.state(module))
            start = time.perf_counter()
            for _ in range(calls):
                group.unshard()
                group.wait_for_unshard()
            rounds[on].append((time.perf_counter() - start) / (2 * calls))
            module.reshard()
    return 1e6 * (statistics.median(rounds[True]) - statistics.median(rounds[False]))


def rounds(steps: int) -> int:
    """How many turns an arm takes."""
    return len(_blocks(steps))


def _blocks(steps: int) -> list[int]:
    full, rest = divmod(steps, BLOCK)
    return [BLOCK] * full + ([rest] if rest else [])


def _try_out(trainer: Trainer, *, required: bool) -> None:
    """First steps. Some stock releases cannot run some arms; the others can still be compared."""
    try:
        with trainer.setting():
            for _ in range(WARM_UP):
                trainer.finish(trainer.step())
    except Exception as error:
        if required:
            raise
        trainer.failure = f"{type(error).__name__}: {error}".splitlines()[0]


def _block(trainer: Trainer, steps: int, device: torch.device) -> tuple[float, float]:
    """The median time of a step, by the slowest rank; and how much of it the CPU was ours."""
    seconds, shares = [], []
    with trainer.setting():
        gc.collect()
        for number in range(WARM_UP + steps):
            if number == WARM_UP and dist.get_world_size() > 1:
                dist.barrier()
            _synchronize(device)
            start, start_cpu = time.perf_counter(), time.process_time()
            loss = trainer.step()
            _synchronize(device)
            seconds.append(time.perf_counter() - start)
            shares.append((time.process_time() - start_cpu) / seconds[-1])
            trainer.finish(loss)
    slowest = max(_of_all_ranks(statistics.median(seconds[WARM_UP:])))
    return slowest, statistics.median(shares[WARM_UP:])


class _Ops(TorchDispatchMode):
    """Counts operators, on local tensors, by their full name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor goes on to call the operator on its local tensor
        if not func.is_view:
            self.counts[str(func._overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


def _count(trainer: Trainer) -> Counter[str]:
    with _Ops() as ops:
        loss = trainer.step()
    trainer.finish(loss)
    return ops.counts


def _collectives(ops: Counter[str]) -> dict[str, int]:
    """Those that FSDP2 and DDP issue; waiting for one is not one."""
    names = {op: op.partition(".")[2].strip("_") for op in ops if op.startswith(("c10d.", "_c10d"))}
    return {name: ops[op] for op, name in names.items() if "wait" not in name}


def _data_ops(ops: Counter[str]) -> Counter[str]:
    """Those that read or write tensor data, other than collectives."""
    found = Counter[str]()
    for op, number in ops.items():
        namespace, _, name = op.partition(".")
        if namespace not in ("c10d", "_c10d_functional", "profiler") and name not in UNTOUCHED:
            found[op] = number
    return found


def _beyond(ours: Counter[str], base: Counter[str]) -> dict[str, int]:
    ours = Counter(ours)
    ours.subtract(base)
    return {op: number for op, number in sorted(ours.items()) if number}


def _memory(trainer: Trainer, device: torch.device) -> tuple[int, int]:
    """Bytes allocated in one step, and the most that were alive beyond the step's start."""
    if device.type == "cuda":
        before = torch.cuda.memory_stats(device)["allocated_bytes.all.allocated"]
        start = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        loss = trainer.step()
        torch.cuda.synchronize(device)
        after = torch.cuda.memory_stats(device)["allocated_bytes.all.allocated"]
        peak = torch.cuda.max_memory_allocated(device) - start
        trainer.finish(loss)
        return after - before, peak
    # The profiler hears of every allocation, also of those that no operator makes.
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        loss = trainer.step()
    events = profiler.profiler.kineto_results.events()
    sizes = [event.nbytes() for event in events if event.name() == "[memory]"]
    trainer.finish(loss)
    alive = peak = 0
    for size in sizes:
        alive += size
        peak = max(peak, alive)
    return sum(size for size in sizes if size > 0), peak


def _trace(trainer: Trainer, device: torch.device, options: Options, model: str) -> None:
    assert options.trace is not None
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, acc_events=True) as profiler:
        for _ in range(2):
            with record_function(f"step ({trainer.title})"):
                loss = trainer.step()
                _synchronize(device)
            trainer.finish(loss)
    if dist.get_rank() == 0:
        options.trace.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(options.trace / f"{model}-{trainer.name}.json"))


def _of_all_ranks(value: Any) -> list[Any]:
    if dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
