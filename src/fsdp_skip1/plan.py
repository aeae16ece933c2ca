"""What each parameter group needs on a shard mesh of size 1, and why.

:func:`plan_group` looks at a group and decides; it changes nothing. ``unshard`` and ``reduce``
carry the decision out, ``report`` prints the same value.
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fsdp_skip1.releases import missing_attributes, storage_holders

if TYPE_CHECKING:
    from fsdp_skip1.releases import Fsdp2


class How(enum.Enum):
    """How one parameter is unsharded."""

    SHARE = "shared"  # a view of the sharded parameter's memory
    COPY = "copied"  # a private buffer, same dtype
    CAST = "cast"  # a private buffer in the policy's param_dtype
    TRANSFER = "transferred"  # from the host, then cast if need be
    EXTENSION = "extension"  # through the tensor subclass's own hooks
    TORCH = "left to torch"


@dataclass(frozen=True)
class ParamPlan:
    """How one parameter is unsharded, and the reason in words."""

    how: How
    reason: str
    # The private buffer from before is still in use by a graph: look again at the next unshard.
    provisional: bool = False
    moves: bool = False  # across to the device first


class Reduction(enum.Enum):
    """How the gradients of one group are reduced."""

    HAND_OVER = "handed over"  # as they stand
    CAST = "cast"  # to the sharded parameters' dtype, perhaps through the policy's reduce_dtype
    DIVIDE = "divided"  # by the user's factor, with casts if need be
    ALL_REDUCE = "all-reduced"  # over replicas, by the user's all-reduce hook, or both
    NONE = "nothing to reduce"
    TORCH = "left to torch"


@dataclass(frozen=True)
class ReducePlan:
    """How one group's gradients are reduced, the reason in words, and what would change it."""

    how: Reduction
    reason: str
    replicas: int
    way_out: str | None = None

    def __str__(self) -> str:
        if self.how is not Reduction.ALL_REDUCE:
            return self.how.value
        if self.replicas == 1:
            return "all-reduce hook"
        return f"all-reduce over {self.replicas} replicas"


@dataclass(frozen=True)
class GroupPlan:
    """The decision for one parameter group.

    Attributes:
        shard_size: size of the group's shard mesh dimension; 1 where there is none.
        replicas: size of its replicate dimension; 1 where there is none.
        params: one plan a parameter, in the order of ``group.fsdp_params``.
        left_to_torch: the reason why torch's own methods run, or None.
        way_out: what would change that, or None.
    """

    shard_size: int
    replicas: int
    params: tuple[ParamPlan, ...]
    left_to_torch: str | None = None
    way_out: str | None = None
    # Something of ours is not as expected, rather than simply not our business.
    unexpected: bool = False


def shard_mesh_size(fsdp2: Fsdp2, mesh_info: Any) -> int | None:
    """Size of the shard mesh dimension; 1 for a replicate-only mesh, None if unknown."""
    if fsdp2.is_shard_mesh(mesh_info):
        return int(mesh_info.shard_mesh_size)
    if fsdp2.is_replicate_only(mesh_info):
        return 1
    return None


def replicate_mesh_size(mesh_info: Any) -> int:
    """Size of the replicate mesh dimension, 1 where there is none."""
    return int(getattr(mesh_info, "replicate_mesh_size", 1))


def plan_group(fsdp2: Fsdp2, group: Any, *, zero_copy: bool) -> GroupPlan:
    """Decide what ``group`` (a torch ``FSDPParamGroup``) needs. Changes nothing."""
    missing = missing_attributes(group)
    if missing:
        return GroupPlan(
            0,
            1,
            (),
            left_to_torch=f"this torch's FSDP2 lacks {', '.join(missing)}",
            way_out="use a torch release that the plugin supports",
            unexpected=True,
        )
    mesh_info = group.mesh_info
    shard_size = shard_mesh_size(fsdp2, mesh_info)
    replicas = replicate_mesh_size(mesh_info)
    if shard_size is None:
        return GroupPlan(
            0,
            replicas,
            (),
            left_to_torch=f"unknown kind of mesh {type(mesh_info).__name__}",
            way_out="use a torch release that the plugin supports",
            unexpected=True,
        )
    if shard_size != 1:
        return GroupPlan(
            shard_size,
            replicas,
            (),
            left_to_torch=f"the shard mesh has size {shard_size}",
            way_out="none needed, parameters really are sharded here",
        )
    reason = special_case(group.fsdp_params)
    if reason is not None:
        way_out = "parameters without such annotations"
        return GroupPlan(1, replicas, (), left_to_torch=reason, way_out=way_out)
    return GroupPlan(
        1, replicas, tuple(plan_param(fsdp_param, zero_copy) for fsdp_param in group.fsdp_params)
    )


def plan_reduce(fsdp2: Fsdp2, group: Any, plan: GroupPlan) -> ReducePlan:
    """Decide how ``group`` reduces its gradients. Changes nothing.

    It says of a whole group, ahead of backward, what ``reduce`` finds out from the gradients that
    arrive.

    Args:
        fsdp2: the FSDP2 that is loaded.
        group: a torch ``FSDPParamGroup``.
        plan: what :func:`plan_group` says of the same group.
    """
    if plan.left_to_torch is not None:
        return ReducePlan(Reduction.TORCH, plan.left_to_torch, plan.replicas, plan.way_out)
    if fsdp2.reduce is None:
        return ReducePlan(
            Reduction.TORCH,
            str(fsdp2.reduce_reason),
            plan.replicas,
            "undo that, and call fsdp_skip1.enable() again",
        )
    trainable = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
    if not trainable:
        return ReducePlan(Reduction.NONE, "every parameter is frozen", plan.replicas)
    hook = getattr(group, "_all_reduce_hook", None) is not None
    if plan.replicas > 1 or hook:
        dtype = short(reduce_dtype(group, trainable))
        reason = "through the all-reduce hook" if hook else "gradients are averaged"
        return ReducePlan(Reduction.ALL_REDUCE, f"{reason}, in {dtype}", plan.replicas)
    factor = divide_factor(group)
    if factor not in (None, 1):
        return ReducePlan(Reduction.DIVIDE, f"by {factor:g}, as the divide factor asks", 1)
    for fsdp_param in trainable:
        have, want = arriving_grad_dtype(group, fsdp_param), sharded_grad_dtype(fsdp_param)
        dtypes = [have, *cast_steps(have, resolved_reduce_dtype(group), want)]
        if any(dtype != have for dtype in dtypes):
            return ReducePlan(Reduction.CAST, f"from {' to '.join(map(short, dtypes))}", 1)
    return ReducePlan(Reduction.HAND_OVER, "the unsharded gradient is the sharded gradient", 1)


def cast_steps(
    have: torch.dtype, through: torch.dtype | None, want: torch.dtype
) -> tuple[torch.dtype, ...]:
    """The dtypes to pass through, leaving out detours that change no bit.

    A detour through a wider dtype is exact; one through a narrower dtype rounds, and stays.
    """
    if through is None or promote(have, through) == through:
        return (want,)
    return (through, want)


def promote(left: torch.dtype, right: torch.dtype) -> torch.dtype:
    """``torch.promote_types``, which is an operator to who looks on, asked once."""
    return left if left is right else _promoted(left, right)


@functools.cache
def _promoted(left: torch.dtype, right: torch.dtype) -> torch.dtype:
    return torch.promote_types(left, right)


def resolved_reduce_dtype(group: Any) -> torch.dtype | None:
    """The policy's ``reduce_dtype`` for this group; None where gradients stay as they are."""
    if hasattr(group, "_reduce_dtype"):  # resolved by FSDP2's lazy initialization
        found: torch.dtype | None = group._reduce_dtype
    else:
        found = group.fsdp_params[0].mp_policy.reduce_dtype
    return found


def reduce_dtype(group: Any, fsdp_params: list[Any]) -> torch.dtype:
    """The dtype in which a reduction runs."""
    wanted = resolved_reduce_dtype(group)
    if wanted is not None:
        return wanted
    if hasattr(fsdp_params[0], "sharded_grad_dtype"):  # 2.15+: as gradients accumulate
        return functools.reduce(promote, [sharded_grad_dtype(p) for p in fsdp_params])
    return unsharded_dtype(fsdp_params[0])


def arriving_grad_dtype(group: Any, fsdp_param: Any) -> torch.dtype:
    """The dtype in which autograd hands the gradient over."""
    computed = unsharded_dtype(fsdp_param)
    if not hasattr(fsdp_param, "sharded_grad_dtype"):
        return computed
    # From 2.15 on the leaf accumulates in a dtype of its own, save that the cast to a wider one
    # waits until the gradient is reduced.
    accumulated = resolved_reduce_dtype(group) or sharded_grad_dtype(fsdp_param)
    wider = accumulated.itemsize > computed.itemsize
    return computed if wider and not fsdp_param.may_reduce_grad_outside_dp else accumulated


def sharded_grad_dtype(fsdp_param: Any) -> torch.dtype:
    """The dtype that the sharded parameter wants its gradient in."""
    if getattr(fsdp_param, "_has_sharded_grad_dtype_override", False):  # 2.15+
        wanted: torch.dtype | None = fsdp_param.sharded_grad_dtype
        return unsharded_dtype(fsdp_param) if wanted is None else wanted
    dtype: torch.dtype = fsdp_param.sharded_param.dtype
    return dtype


def divide_factor(group: Any) -> float | None:
    """What the user wants the sum of gradients divided by; None is their number of replicas."""
    factor: float | None = getattr(group, "gradient_divide_factor", None)
    premultiplied = getattr(group, "reduce_scatter_reduce_op", None)  # 2.6, 2.7
    if factor is None and premultiplied is not None:
        return factor_of(premultiplied)
    return factor


def factor_of(premultiplied: Any) -> float:
    """The divisor inside a premultiplied-sum operation, the only place where 2.7 keeps it."""
    _, multiplier = premultiplied.__getstate__()
    return 1.0 / float(multiplier) if multiplier is not None else 1.0


def special_case(fsdp_params: list[Any]) -> str | None:
    """Kinds of parameters whose handling stays torch's, or None."""
    if _annotations_exist():
        for fsdp_param in fsdp_params:
            if getattr(fsdp_param, "is_spmd_types", False):
                return "parameters annotated with spmd_types"
    return None


@functools.cache
def _annotations_exist() -> bool:
    available = getattr(torch.distributed, "_is_spmd_types_available", None)  # 2.13+
    return available is not None and bool(available())


def plan_param(fsdp_param: Any, zero_copy: bool) -> ParamPlan:
    """Decide how one ``FSDPParam`` is unsharded."""
    data = fsdp_param._sharded_param_data
    if hasattr(fsdp_param.sharded_param._local_tensor, "fsdp_pre_all_gather"):
        reason = f"{type(data).__name__} brings its own all-gather hooks"
        return ParamPlan(How.EXTENSION, reason, moves=offloaded(fsdp_param))
    if data.device.type == "meta":
        return ParamPlan(How.COPY, "still on the meta device")
    if offloaded(fsdp_param):
        reason = f"offloaded to {data.device}, computed on {fsdp_param.device}"
        return ParamPlan(How.TRANSFER, reason, moves=True)
    dtype = unsharded_dtype(fsdp_param)
    if dtype != data.dtype:
        return ParamPlan(How.CAST, f"kept in {short(data.dtype)}, computed in {short(dtype)}")
    if type(data) is not torch.Tensor:
        return ParamPlan(How.COPY, f"a {type(data).__name__} cannot lend its memory")
    if data.is_inference():
        return ParamPlan(How.COPY, "made in inference mode, which training cannot use")
    if not zero_copy:
        return ParamPlan(How.COPY, "zero_copy=False keeps a private copy")
    if data.numel() != fsdp_param._orig_size.numel():
        return ParamPlan(How.COPY, "the sharded parameter is padded")
    if _private_buffer_in_use(fsdp_param):
        return ParamPlan(
            How.COPY, "a graph from before still holds the private buffer", provisional=True
        )
    return ParamPlan(How.SHARE, "the sharded parameter is the whole parameter")


def unsharded_dtype(fsdp_param: Any) -> torch.dtype:
    """The dtype that forward and backward compute in."""
    data_dtype: torch.dtype = fsdp_param._sharded_param_data.dtype
    if hasattr(fsdp_param, "param_dtype"):  # resolved by FSDP2's lazy initialization
        return fsdp_param.param_dtype or data_dtype
    wanted: torch.dtype | None = getattr(fsdp_param.mp_policy, "param_dtype", None)
    return wanted if wanted is not None and data_dtype.is_floating_point else data_dtype


def _private_buffer_in_use(fsdp_param: Any) -> bool:
    """Whether someone besides FSDP2 holds the buffer that torch unsharded into.

    The buffer and the unsharded parameter over it hold its storage. A third holder is a view
    that autograd saved (``W.t()``, say); it must find the parameter there again in backward.
    """
    unsharded = getattr(fsdp_param, "_unsharded_param", None)
    buffers = fsdp_param.all_gather_outputs
    return unsharded is not None and len(buffers) == 1 and storage_holders(buffers[0]) > 2


def offloaded(fsdp_param: Any) -> bool:
    """Whether the sharded parameter is kept on another device than it is computed on."""
    left, right = fsdp_param._sharded_param_data.device, fsdp_param.device
    if left.type != right.type:
        return left.type != "meta"
    # ``cuda`` and ``cuda:0`` are one device as long as it is the current one.
    return left.index is not None and right.index is not None and left.index != right.index


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
