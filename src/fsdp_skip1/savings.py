"""What a step costs at shard size 1, in stock FSDP2 of this release and by the plan.

Both are counted from what the code does, not measured: over one forward and one backward of
every group, the operators that move data, collectives among them, and the bytes that these
write. Left out are what depends on the data (a gradient that is not contiguous, say), what the
hooks of a tensor subclass do, what a backend does inside a collective, the divisions that go
with an all-reduce, and Python's own time, which no operator shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fsdp_skip1.others import leads_to_torch
from fsdp_skip1.plan import (
    How,
    Reduction,
    arriving_grad_dtype,
    cast_steps,
    divide_factor,
    offloaded,
    reduce_dtype,
    resolved_reduce_dtype,
    sharded_grad_dtype,
    unsharded_dtype,
)
from fsdp_skip1.releases import copies_instead, divides_by_one

if TYPE_CHECKING:
    from fsdp_skip1.plan import GroupPlan, ReducePlan
    from fsdp_skip1.releases import Fsdp2


@dataclass(frozen=True)
class Work:
    """Operators that move data, collectives among them, and the bytes they write."""

    launches: int = 0
    nbytes: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.launches + other.launches, self.nbytes + other.nbytes)

    def __sub__(self, other: Work) -> Work:
        return Work(self.launches - other.launches, self.nbytes - other.nbytes)

    def __mul__(self, times: int) -> Work:
        return Work(self.launches * times, self.nbytes * times)


class Stock:
    """What stock FSDP2 of this release does for a group of shard size 1."""

    def __init__(self, fsdp2: Fsdp2) -> None:
        cls, module = fsdp2.group_classes[0], fsdp2.group_module
        unshard = leads_to_torch(vars(cls).get("wait_for_unshard"), "wait_for_unshard", cls)
        reduce = leads_to_torch(vars(module).get("foreach_reduce"), "foreach_reduce", module)
        # Where torch's own is out of sight, take it for the newer one, which costs less.
        self._gathers = unshard is not None and not copies_instead(unshard)
        self._scatters = reduce is not None and not copies_instead(reduce)
        self._no_division = (None,) if reduce is None or divides_by_one(reduce) else (None, 1)

    def unshard(self, group: Any) -> Work:
        params = _plain(group)
        whole = sum(map(_unsharded_nbytes, params))
        moved = [p for p in params if offloaded(p)]
        cast = [p for p in params if unsharded_dtype(p) != _data(p).dtype]
        work = Work(len(moved), sum(_data(p).nbytes for p in moved))
        if not self._gathers:
            work += Work(len(params), whole)
            work += Work(len(cast), sum(map(_unsharded_nbytes, cast)))
        elif params:
            work += Work(3, 2 * whole)  # copied in, gathered in place, copied out
            if cast:
                by_one = any(p.offload_to_cpu for p in cast)
                work += Work(len(cast) if by_one else 1, sum(map(_unsharded_nbytes, cast)))
        return work

    def reduce(self, group: Any) -> Work:
        params = trainable(group)
        if not params:
            return Work()
        through = reduce_dtype(group, params)
        flat = _numel(params) * through.itemsize
        # Copied into one buffer; from there scattered, or copied once more.
        work = Work(2, 2 * flat)
        if not self._scatters and divide_factor(group) not in self._no_division:
            work += Work(1, flat)  # divided into a temporary
        if hasattr(group.mesh_info, "replicate_mesh_size"):
            work += Work(1, flat)
        return work + _cast_back(params, through)


def saved(stock: Stock, group: Any, plan: GroupPlan, reduction: ReducePlan, times: int) -> Work:
    """What a step saves for one group.

    Args:
        stock: what it would cost otherwise.
        group: a torch ``FSDPParamGroup``.
        plan: how its parameters are unsharded.
        reduction: how its gradients are reduced.
        times: how often a step unshards it.
    """
    work = Work()
    if plan.left_to_torch is None:
        work += (stock.unshard(group) - _unshard(group, plan)) * times
    if reduction.how is not Reduction.TORCH:
        work += stock.reduce(group) - _reduce(group, reduction)
    return work


def unshards(group: Any, *, is_root: bool | None) -> int:
    """How often a step unshards the group.

    Args:
        group: a torch ``FSDPParamGroup``.
        is_root: whether lazy initialization will find it at the root, which keeps its parameters
            for backward; None if it has run.
    """
    resharded = group.post_forward_mesh_info is not None and not is_root
    return 2 if resharded and group.unshard_in_backward else 1


def trainable(group: Any) -> list[Any]:
    return [p for p in group.fsdp_params if p.sharded_param.requires_grad]


def _unshard(group: Any, plan: GroupPlan) -> Work:
    """By the plan: one copy for each pair of dtypes, and before it one across the bus for each."""
    work, pairs, crossing = Work(), set(), set()
    for fsdp_param, param_plan in zip(group.fsdp_params, plan.params):
        if param_plan.how in (How.SHARE, How.EXTENSION):
            continue
        data, dtype = _data(fsdp_param), unsharded_dtype(fsdp_param)
        if param_plan.how is How.TRANSFER:
            crossing.add(data.dtype)
            work += Work(0, data.nbytes)
            pairs.add((dtype, data.dtype, fsdp_param.device))
        else:
            pairs.add((dtype, data.dtype, data.device))
        work += Work(0, _unsharded_nbytes(fsdp_param))
    return work + Work(len(pairs) + len(crossing))


def _reduce(group: Any, reduction: ReducePlan) -> Work:
    params = trainable(group)
    if reduction.how is Reduction.ALL_REDUCE:
        through = reduce_dtype(group, params)
        flat = _numel(params) * through.itemsize
        work = Work(1, flat)
        if reduction.replicas > 1:
            work += Work(1, flat)
        return work + _cast_back(params, through)
    work, pairs = Work(), set()
    if reduction.how is Reduction.DIVIDE:
        work += Work(1, _numel(params) * reduce_dtype(group, params).itemsize)
    for fsdp_param in params:
        dtype, want = arriving_grad_dtype(group, fsdp_param), sharded_grad_dtype(fsdp_param)
        if reduction.how is Reduction.DIVIDE:
            steps: tuple[Any, ...] = (reduce_dtype(group, params), want)
        else:
            steps = cast_steps(dtype, resolved_reduce_dtype(group), want)
        for level, step in enumerate(steps):
            if step != dtype:
                pairs.add((level, step))
                work += Work(0, _data(fsdp_param).numel() * step.itemsize)
            dtype = step
    return work + Work(len(pairs))


def _cast_back(params: list[Any], reduced: Any) -> Work:
    """From the dtype of the reduction to those of the sharded parameters."""
    cast = [p for p in params if sharded_grad_dtype(p) != reduced]
    nbytes = sum(_data(p).numel() * sharded_grad_dtype(p).itemsize for p in cast)
    return Work(len({sharded_grad_dtype(p) for p in cast}), nbytes)


def _plain(group: Any) -> list[Any]:
    """Parameters that bring no all-gather hooks of their own."""
    return [
        p
        for p in group.fsdp_params
        if not hasattr(p.sharded_param._local_tensor, "fsdp_pre_all_gather")
    ]


def _unsharded_nbytes(fsdp_param: Any) -> int:
    return int(_data(fsdp_param).numel() * unsharded_dtype(fsdp_param).itemsize)


def _numel(params: list[Any]) -> int:
    return sum(_data(p).numel() for p in params)


def _data(fsdp_param: Any) -> Any:
    return fsdp_param._sharded_param_data
