"""Carries the plan out after backward: ``foreach_reduce`` for a shard mesh of size 1.

With one rank to scatter over, the unsharded gradient is the sharded gradient. What is left to
do is a division, if the user asked for one; a cast, if the dtypes differ; an all-reduce, if
there are replicas; and the hooks.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fsdp_skip1 import overlap
from fsdp_skip1.counters import counters
from fsdp_skip1.plan import cast_steps, factor_of, promote, shard_mesh_size, special_case
from fsdp_skip1.releases import storage_holders

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fsdp_skip1.releases import Fsdp2, ReduceArgs, ReduceLayout

    Wrap = Callable[[Any, torch.Tensor], torch.Tensor]


class Reducer:
    """``foreach_reduce`` for groups whose shard mesh has size 1; the rest stay torch's."""

    def __init__(self, fsdp2: Fsdp2, layout: ReduceLayout, wrap: Wrap) -> None:
        self._fsdp2 = fsdp2
        self._layout = layout
        self._wrap = wrap  # makes a sharded gradient of a parameter's local gradient

    def foreach_reduce(
        self, wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        call = self._layout.bind(args, kwargs)
        if not self._is_ours(call):
            return wrapped(*args, **kwargs)
        if torch.autograd._profiler_enabled():
            with torch.profiler.record_function("FSDP::reduce_scatter (skipped: shard size 1)"):
                return self._reduce(call)
        return self._reduce(call)

    def stop(self) -> None:
        """Leave nothing in flight."""
        overlap.finish_all()

    def _is_ours(self, call: ReduceArgs) -> bool:
        if self._fsdp2.compiled_autograd_enabled():
            return False
        group = call.reduce_scatter_group
        if group is not None and group.size() != 1:
            return False
        seen = None
        for fsdp_param in call.fsdp_params:
            mesh_info = fsdp_param.mesh_info
            if mesh_info is not seen and shard_mesh_size(self._fsdp2, mesh_info) != 1:
                return False
            seen = mesh_info
        for grad in call.grads:
            if grad.layout is not torch.strided:  # FSDP2 says that it cannot do that
                return False
        return special_case(call.fsdp_params) is None

    def _reduce(self, call: ReduceArgs) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # a backward with create_graph=True
            with torch.no_grad():
                return self._reduce(call)
        # The caller's list owns the gradients: emptying it lets each go as soon as it is used.
        grads = [g if type(g) is torch.Tensor else _plain(g) for g in call.grads]
        call.grads.clear()
        counters.reduce_scatters += 1
        counters.reduce_scatter_bytes += sum([g.nbytes for g in grads])
        replicas = call.all_reduce_group
        if (
            replicas is not None
            and replicas.size() == 1
            and call.all_reduce_grads
            and call.partial_reduce_output is None
        ):
            replicas = None  # an all-reduce over one rank
        if replicas is None and call.all_reduce_hook is None:
            return self._hand_over(call, grads)
        return self._all_reduce(call, grads, replicas)

    def _hand_over(self, call: ReduceArgs, grads: list[torch.Tensor]) -> tuple[Any, ...]:
        """Nothing to reduce: the gradients become the sharded gradients, as they stand."""
        factor = _user_factor(call)
        if factor is None and _uniform(call, grads):
            _make_own(grads, range(len(grads)))
        elif factor is None:
            targets = _targets(call, grads)
            steps = [cast_steps(g.dtype, call.reduce_dtype, t) for g, t in zip(grads, targets)]
            arrived, grads = grads, _cast(grads, steps, call.device)
            _make_own(grads, [i for i, grad in enumerate(grads) if grad is arrived[i]])
            del arrived
        else:
            reduce_dtype = _reduce_dtype(call, grads)
            arrived, grads = grads, _cast(grads, [(reduce_dtype,)] * len(grads), call.device)
            _make_own(grads, [i for i, grad in enumerate(grads) if grad is arrived[i]])
            del arrived
            torch._foreach_div_(grads, factor)
            grads = _cast(grads, [(t,) for t in _targets(call, grads)], call.device)
        stream = _current_stream(call.device)
        if call.device.type == "cpu" or not any(p.offload_to_cpu for p in call.fsdp_params):
            _accumulate(call.fsdp_params, grads, stream, self._wrap)
            done = _record(stream, call.device)
            return self._layout.result(_nothing(call.device), done, stream, done)
        # To the host beside the rest of backward, on the stream where stock has it.
        held = tuple(grads)  # until then: the memory belongs to the stream that computes
        call.reduce_scatter_stream.wait_stream(stream)
        stream = call.reduce_scatter_stream
        with torch.get_device_module(call.device).stream(stream):
            _accumulate(call.fsdp_params, grads, stream, self._wrap)
            done = _record(stream, call.device)
        return self._layout.result(held, done, stream, done)

    def _all_reduce(
        self, call: ReduceArgs, grads: list[torch.Tensor], replicas: Any
    ) -> tuple[Any, ...]:
        """Flatten once into the buffer of the all-reduce; the sharded gradients then view it.

        Streams are as in stock, less the copy between reduce-scatter input and output: the
        partial sums belong to the reduce-scatter stream, the rest to the all-reduce stream.
        """
        overlap.finish_before(call.fsdp_params)
        device_module = torch.get_device_module(call.device)
        reduce_dtype = _reduce_dtype(call, grads)
        division = Division.read(self._fsdp2, call, reduce_dtype, replicas)
        sizes = [grad.size() for grad in grads]
        flat = _flatten(grads, reduce_dtype, call.device)
        grads.clear()  # only after the copy may the gradients be freed
        scatter, reduce = call.reduce_scatter_stream, call.all_reduce_stream
        scatter.wait_stream(_current_stream(call.device))
        with device_module.stream(scatter):
            division.before(flat)
            held: Any = flat
            if replicas is not None:
                partial = call.partial_reduce_output
                if not call.all_reduce_grads:
                    if partial is not None:
                        partial += flat
                    else:
                        partial = flat
                    event = _record(scatter, call.device)
                    return self._layout.result(
                        flat, event, scatter, event, partial_reduce_output=partial
                    )
                if partial is not None:
                    flat += partial
                    held = (flat, partial)
            scattered = _record(scatter, call.device)
        reduce.wait_stream(scatter)
        if self._stays_in_flight(call, replicas):
            work = dist.all_reduce(flat, group=replicas, op=division.op, async_op=True)

            def finish() -> None:
                division.averaging(flat)
                division.after(flat)
                _accumulate_views(call, flat, sizes, reduce, self._wrap)

            overlap.current().add(work, finish, call.fsdp_params)
            return self._layout.result(flat, None, reduce, None)
        with device_module.stream(reduce):
            if replicas is not None and replicas.size() > 1:
                dist.all_reduce(flat, group=replicas, op=division.op)
            division.averaging(flat)
            if call.all_reduce_hook is not None:
                call.all_reduce_hook(flat)
            reduced = _record(reduce, call.device)
            division.after(flat)
            _accumulate_views(call, flat, sizes, reduce, self._wrap)
            done = _record(reduce, call.device)
        # FSDP2 holds ``flat`` until ``reduced``; otherwise the next group's gradients could be
        # flattened into the same memory while this all-reduce still runs (pytorch PR 140044).
        all_reduced = None if reduced is None else flat
        return self._layout.result(held, scattered, reduce, done, all_reduced, reduced)

    @staticmethod
    def _stays_in_flight(call: ReduceArgs, replicas: Any) -> bool:
        """Whether the all-reduce may overlap what comes after, see [Note: overlap on the CPU].

        Hooks want finished gradients.
        """
        return (
            replicas is not None
            and replicas.size() > 1
            and call.all_reduce_hook is None
            and overlap.possible(call.device)
            and not any(
                getattr(p.sharded_param, "_post_accumulate_grad_hooks", None)
                for p in call.fsdp_params
            )
        )


class Division:
    """Where the gradient is divided, and by what.

    A factor divides the sum over replicas once. Stock divides twice where it splits the factor
    around the reduction (fp16, forced sums) and then copies with a division besides. Where an
    average is made of a sum and a division, that division is part of the collective: all-reduce
    hooks come after it, and before what else there is to divide.
    """

    __slots__ = ("_after", "_average", "_before", "op")

    def __init__(
        self, before: float | None, after: float | None, op: Any, average: float | None = None
    ) -> None:
        self._average = None if average == 1 else average
        self._before = None if before == 1 else before
        self._after = None if after == 1 else after
        self.op = op

    def before(self, flat: torch.Tensor) -> None:
        if self._before is not None:
            flat.div_(self._before)

    def averaging(self, flat: torch.Tensor) -> None:
        if self._average is not None:
            flat.div_(self._average)

    def after(self, flat: torch.Tensor) -> None:
        if self._after is not None:
            flat.div_(self._after)

    @classmethod
    def read(
        cls, fsdp2: Fsdp2, call: ReduceArgs, reduce_dtype: torch.dtype, replicas: Any
    ) -> Division:
        """Take the split from torch, which knows it by release, dtype and device."""
        factor = _user_factor(call)
        size = 1 if replicas is None else replicas.size()
        overflow_risk = reduce_dtype not in (torch.float32, torch.bfloat16)
        if factor is not None and "factor" not in fsdp2.divide_factor_names:  # 2.6, 2.7
            before = _near_root(factor) if overflow_risk else factor
            return cls(before, factor / before, dist.ReduceOp.SUM)
        # Where neither dtype nor device asks for a split, torch would premultiply inside the
        # reduce-scatter, which is skipped.
        by_hand = factor is not None and not overflow_risk and not call.force_sum
        if by_hand and factor != size:
            return cls(factor, None, dist.ReduceOp.SUM)
        given = {
            "reduce_scatter_group": call.reduce_scatter_group,
            "all_reduce_group": replicas,
            "reduce_dtype": reduce_dtype,
            "device_type": call.device.type,
            "factor": factor,
            "force_sum_reduction_for_comms": call.force_sum,
        }
        named = {k: v for k, v in given.items() if k in fsdp2.divide_factor_names}
        split = fsdp2.divide_factors(**named)
        if len(split) == 2:  # 2.6, 2.7: no split means that the collective averages
            before, after = split
            op: Any = dist.ReduceOp.AVG if before is None else dist.ReduceOp.SUM
        else:
            before, after, _, op = split
        if op == dist.ReduceOp.AVG and call.device.type == "cpu":
            # gloo's average is this sum and division, bit for bit, and until 2.7 it had none.
            return cls(before, after, dist.ReduceOp.SUM, float(size))
        return cls(factor if by_hand and op != dist.ReduceOp.AVG else before, after, op)


def _near_root(factor: float) -> float:
    """The power of two by which the releases from 2.8 on divide before a sum in fp16.

    Half of the division comes before the sum, so that it cannot overflow, and half behind it, so
    that small gradients do not vanish.
    """
    before = 1.0
    while factor > before * before and factor % before == 0:
        before *= 2
    return before


def _user_factor(call: ReduceArgs) -> float | None:
    """What the user wants the sum of gradients divided by; None where that changes nothing."""
    factor = call.user_divide_factor
    if factor is None and call.premultiplied_op is not None:
        factor = factor_of(call.premultiplied_op)
    if factor == 1 and (call.all_reduce_group is None or call.all_reduce_group.size() == 1):
        return None
    return factor


def _uniform(call: ReduceArgs, grads: Sequence[torch.Tensor]) -> bool:
    """Whether every gradient already has the dtype that its sharded parameter wants."""
    through = call.reduce_dtype
    if call.has_orig_dtype:
        orig = call.orig_dtype
        for grad in grads:
            dtype = grad.dtype
            if orig is not None and dtype is not orig:
                return False
            if through is not None and promote(dtype, through) is not through:
                return False
        return True
    return all(
        p.sharded_grad_dtype in (None, g.dtype)
        and (through is None or promote(g.dtype, through) is through)
        for p, g in zip(call.fsdp_params, grads)
    )


def _make_own(grads: list[torch.Tensor], indices: Sequence[int]) -> None:
    """See to it that each gradient is contiguous and that nobody else can write to it.

    autograd steals gradients without looking at storages, so that two parameters can end up
    with views of one. In a plain module, too, but stock FSDP2 copies. A gradient that is part of
    a graph (``create_graph=True``) must not change under it either.
    """
    for i in indices:
        grad = grads[i]
        if not grad.is_contiguous() or grad.requires_grad or storage_holders(grad) > 1:
            grads[i] = grad.clone(memory_format=torch.contiguous_format)


def _plain(grad: torch.Tensor) -> torch.Tensor:
    """Wait for a gradient that tensor parallelism is still reducing."""
    wait = getattr(grad, "wait", None)
    if wait is not None and type(grad) is not torch.Tensor:
        grad = wait()
    return grad


def _reduce_dtype(call: ReduceArgs, grads: Sequence[torch.Tensor]) -> torch.dtype:
    if call.reduce_dtype is not None:
        return call.reduce_dtype
    # Gradients of one group can differ in dtype, e.g. when one first arrives on the last of
    # several microbatches while the others have been accumulated.
    dtype = grads[0].dtype
    for grad in grads[1:]:
        if grad.dtype != dtype:
            dtype = promote(dtype, grad.dtype)
    return dtype


def _sharded_grad_dtype(call: ReduceArgs, fsdp_param: Any, grad: torch.Tensor) -> torch.dtype:
    """The dtype that the sharded parameter wants its gradient in."""
    wanted: torch.dtype | None
    if call.has_orig_dtype:
        wanted = call.orig_dtype
    else:
        wanted = fsdp_param.sharded_grad_dtype  # 2.15+; None: whatever arrives
    return grad.dtype if wanted is None else wanted


def _targets(call: ReduceArgs, grads: Sequence[torch.Tensor]) -> list[torch.dtype]:
    return [_sharded_grad_dtype(call, p, g) for p, g in zip(call.fsdp_params, grads)]


def _cast(
    tensors: Sequence[torch.Tensor],
    steps: Sequence[tuple[torch.dtype, ...]],
    device: torch.device,
) -> list[torch.Tensor]:
    """Cast each tensor through its dtypes, one multi-tensor call a step, where one is needed."""
    result = list(tensors)
    for level in range(max(len(s) for s in steps)):
        by_dtype: dict[torch.dtype, list[int]] = {}
        for i, dtypes in enumerate(steps):
            if level < len(dtypes) and result[i].dtype != dtypes[level]:
                by_dtype.setdefault(dtypes[level], []).append(i)
        for dtype, indices in by_dtype.items():
            sources = [result[i] for i in indices]
            flat = torch.empty(sum(t.numel() for t in sources), dtype=dtype, device=device)
            targets = _views(flat, [t.size() for t in sources])
            torch._foreach_copy_(targets, sources)
            for i, target in zip(indices, targets):
                result[i] = target
    return result


def _flatten(
    grads: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    flat = torch.empty(sum(g.numel() for g in grads), dtype=dtype, device=device)
    torch._foreach_copy_(_views(flat, [g.size() for g in grads]), list(grads))
    return flat


def _views(flat: torch.Tensor, sizes: Sequence[torch.Size]) -> list[torch.Tensor]:
    views, offset = [], 0
    for size in sizes:
        numel = math.prod(size)
        views.append(flat.narrow(0, offset, numel).view(size))
        offset += numel
    return views


def _accumulate(
    fsdp_params: Sequence[Any], grads: list[torch.Tensor], stream: Any, wrap: Wrap
) -> None:
    """Set or add up the sharded gradients, move offloaded ones to the host, run the hooks."""
    grads.reverse()
    for fsdp_param in fsdp_params:
        grad = grads.pop()  # so that one moved to the host is freed here at once
        sharded_param = fsdp_param.sharded_param
        hooks = getattr(sharded_param, "_post_accumulate_grad_hooks", None)
        existing = sharded_param.grad
        if fsdp_param.offload_to_cpu:
            # Only a fresh gradient that no hook will read on the host may still be in flight.
            non_blocking = fsdp_param.pin_memory and existing is None and not hooks
            grad = grad.to("cpu", non_blocking=non_blocking)
            if non_blocking:
                fsdp_param.grad_offload_event = stream.record_event()
        if existing is not None:
            existing._local_tensor += grad
        else:
            sharded_param.grad = wrap(fsdp_param, grad)
        if hooks:
            for hook in hooks.values():
                hook(sharded_param)


@functools.cache
def _nothing(device: torch.device) -> torch.Tensor:
    """What stands for a reduce-scatter input where there was none."""
    return torch.empty(0, device=device)


def _accumulate_views(
    call: ReduceArgs, flat: torch.Tensor, sizes: Sequence[torch.Size], stream: Any, wrap: Wrap
) -> None:
    views = _views(flat, sizes)
    steps = [(dtype,) for dtype in _targets(call, views)]
    _accumulate(call.fsdp_params, _cast(views, steps, call.device), stream, wrap)


def _current_stream(device: torch.device) -> Any:
    return torch.get_device_module(device).current_stream()


def _record(stream: Any, device: torch.device) -> Any:
    # On the CPU everything is in order already, and streams are stand-ins.
    return None if device.type == "cpu" else stream.record_event()
