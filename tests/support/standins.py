"""Stand-ins for what FSDP2 needs on CPU with gloo and old releases of torch lack.

Each is applied only where looking shows that it is missing. They make stock FSDP2 run on CPU;
none of them is about shard meshes of size 1. ``cpu_streams`` has one more, needed even earlier.
"""

import functools
import inspect
from typing import Any

import torch
import torch.distributed as dist

from support.ranks import Rank, run_ranks

# - Version counters: the CPU kernel behind 2.6's copy-out counts as a change of the unsharded
#   parameters, where the CUDA kernel does not, and autograd then refuses to run backward.


def copy_out_keeps_versions() -> bool:
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    source = inspect.getsource(_fsdp_collectives)
    return "_unsafe_preserve_version_counter" in source


def install_copy_out() -> None:
    if copy_out_keeps_versions():
        return
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group

    function = keeping_versions(_fsdp_collectives.foreach_all_gather_copy_out)
    for module in (_fsdp_collectives, _fsdp_param_group):
        module.foreach_all_gather_copy_out = function


def keeping_versions(original):
    @functools.wraps(original)
    def foreach_all_gather_copy_out(all_gather_result, fsdp_params, group):
        outputs = [t for p in fsdp_params for t in p.all_gather_outputs if not t.is_inference()]
        versions = [t._version for t in outputs]
        original(all_gather_result, fsdp_params, group)
        for output, version in zip(outputs, versions, strict=True):
            torch._C._autograd._unsafe_set_version_counter(output, version)

    return foreach_all_gather_copy_out


# - Events: 2.6 and 2.7 insist on an event for each all-reduce, which CPU streams do not give; and
#   a prefetch that nothing waited for makes any event wait on the accelerator that is not there.


def cpu_needs_events() -> bool:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    source = inspect.getsource(FSDPParamGroup.post_backward)
    return "all_reduce_event is not None" in source and 'device.type != "cpu"' not in source


def install_events() -> None:
    if not cpu_needs_events() or torch.cuda.is_available():
        return
    torch.cpu.Stream.record_event = lambda self, event=None: event or torch.cpu.Event()
    torch.cuda.current_stream = torch.cpu.current_stream
    torch.accelerator.current_stream = torch.cpu.current_stream


# - Averages: gloo of 2.6 and 2.7 cannot average in an all-reduce. Later releases sum and divide.


def _averages(rank: Rank) -> bool:
    try:
        dist.all_reduce(torch.ones(1), op=dist.ReduceOp.AVG)
    except RuntimeError:
        return False
    return True


@functools.cache
def gloo_averages() -> bool:
    """Asked of a forked rank, since the parent must not open a process group."""
    return run_ranks(_averages, world=1)[0]


class _DividedAfterwards:
    """Work whose ``wait`` ends with the division that the back end could not do."""

    def __init__(self, work: Any, tensor: torch.Tensor, size: int):
        self._work, self._tensor, self._size = work, tensor, size

    def wait(self, *args: Any) -> bool:
        done = self._work.wait(*args)
        if self._size:
            self._tensor.div_(self._size)
            self._size = 0
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def install_average() -> None:
    if gloo_averages() or "_averaging" in vars(dist.all_reduce):
        return
    original = dist.all_reduce

    @functools.wraps(original)
    def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if op != dist.ReduceOp.AVG:
            return original(tensor, op=op, group=group, async_op=async_op)
        size = dist.get_world_size(group)
        work = original(tensor, op=dist.ReduceOp.SUM, group=group, async_op=async_op)
        if async_op:
            return _DividedAfterwards(work, tensor, size)
        tensor.div_(size)
        return work

    all_reduce._averaging = True
    dist.all_reduce = dist.distributed_c10d.all_reduce = all_reduce
