"""The step of a settled group in one piece.

Once every parameter of a group shares memory, and its gradients are handed over as they stand, a
step decides nothing any more. What is left of torch's methods is to put parameters on modules, to
set gradients and to keep the books; through torch's own code that is a few hundred calls a group,
which on small layers cost more than the layer. Here it is one method each for ``pre_forward``,
``post_forward``, ``pre_backward``, ``post_backward`` and ``finalize_backward``.

Each looks first and changes nothing until it knows that it can finish; otherwise torch's method
runs. It leaves behind what torch's would have left: states, recorded order, events, gradients. See
``proven`` for the releases whose methods these are known to equal. The loops over parameters are
written out: on small layers a call each is what they would cost most for.
"""

from __future__ import annotations

import logging
import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fsdp_skip1 import proven, roots
from fsdp_skip1.counters import counters
from fsdp_skip1.frames import frame_callback
from fsdp_skip1.hooks import Hooks
from fsdp_skip1.others import of_class
from fsdp_skip1.plan import replicate_mesh_size
from fsdp_skip1.releases import functorch_active
from fsdp_skip1.trims import (
    alias,
    blank_dtensor,
    chosen,
    inputs_with_grad,
    may_be_viewed,
    new_dtensor,
    places_of,
    type_checking,
    view_before,
    with_inputs,
)
from fsdp_skip1.unshard import ATTRIBUTE, lock

if TYPE_CHECKING:
    from collections.abc import Callable

    from fsdp_skip1.points import Wrapping
    from fsdp_skip1.releases import Fsdp2
    from fsdp_skip1.trims import Places
    from fsdp_skip1.unshard import GroupState

_PARAM_METHODS = frozenset(proven.PARAM_METHODS)
_STATE_METHODS = frozenset((*proven.STATE_METHODS, *proven.SOME_STATE_METHODS))
_profiling = torch.autograd._profiler_enabled
_modes = torch._C._len_torch_dispatch_stack  # see ``trims.observed``
_backward = torch._C._current_graph_task_id  # -1 outside
_holders = torch._C._storage_Use_Count
_Tensor, _strided = torch.Tensor, torch.strided
# Without asking each DTensor for its ``__torch_function__``, which would do nothing.
_by_torch = torch._C.DisableTorchFunctionSubclass
_compiling = torch.compiler.is_dynamo_compiling  # a constant to who traces


class Steady:
    """One settled group: where its parameters are, and what its gradients have to be.

    Attributes:
        slots: for each parameter its ``FSDPParam``, the unsharded parameter, the sharded storage's
            flat tensor that it was settled with, its size in bytes, its module, its name there,
            and the other places where it is registered. Its dtypes stay: torch resolves them once.
        classes: of the modules, whose ``__setattr__`` is torch's.
        blanks: for each parameter, ``trims.blank_dtensor``.
        hands_over: gradients of ``dtype`` become the sharded gradients as they stand.
    """

    __slots__ = (
        "blanks",
        "classes",
        "dtype",
        "hands_over",
        "mesh_info",
        "nbytes",
        "pending",
        "reduce_dtype",
        "slots",
    )

    def __init__(
        self,
        group: Any,
        state: GroupState,
        places: Places,
        blank_of: Callable[[Any], Any],
    ) -> None:
        self.classes = frozenset(places.classes)
        self.slots = [
            (p, p._unsharded_param, data, data.nbytes, *where[0], where[1:])
            for (p, data, _), (_, where) in zip(state.basis, places.slots)
        ]
        self.blanks = tuple(blank_of(fsdp_param) for fsdp_param in group.fsdp_params)
        self.pending = state.pending
        self.nbytes = state.nbytes
        self.mesh_info = group.mesh_info
        self.reduce_dtype = getattr(group, "_reduce_dtype", None)
        self.dtype = state.basis[0][1].dtype
        self.hands_over = replicate_mesh_size(group.mesh_info) == 1 and all(
            self._is_handed_over(fsdp_param) for fsdp_param in group.fsdp_params
        )

    def _is_handed_over(self, fsdp_param: Any) -> bool:
        dtype, through = self.dtype, self.reduce_dtype
        meta = getattr(fsdp_param._sharding_spec, "tensor_meta", None)
        return (
            type(fsdp_param._unsharded_param) is nn.Parameter
            and fsdp_param._unsharded_param.dtype is dtype
            and fsdp_param.sharded_param.dtype is dtype
            and fsdp_param._unsharded_param.shape == fsdp_param.sharded_size
            and meta is not None
            and meta.dtype is dtype
            and not fsdp_param.offload_to_cpu
            # Else torch accumulates in another dtype, beside the parameter.
            and (through is None or through is dtype)
        )


class Stepper:
    """The four methods, for one FSDP2. One lives as long as the plugin is on."""

    def __init__(
        self,
        fsdp2: Fsdp2,
        release: proven.Release,
        new: Callable[[torch.Tensor, Any], torch.Tensor],
    ) -> None:
        self._fsdp2 = fsdp2
        self._cls: Any = fsdp2.group_classes[0]
        self.states = states = fsdp2.training_states
        self.release = release
        self._idle, self._forward = states.IDLE, states.FORWARD
        self._pre_backward, self._post_backward = states.PRE_BACKWARD, states.POST_BACKWARD
        self._sharded, self._unsharded = fsdp2.sharded, fsdp2.unsharded
        self._type_checking = type_checking()
        self._new = new
        logger = getattr(fsdp2.group_module, "logger", None)
        self._logger = logger if isinstance(logger, logging.Logger) else None
        # What the methods here stand in for: as it was found when the plugin was switched on.
        self._watched: list[tuple[Any, Callable[[Any], Any], Any]] = []
        self._methods = frozenset(proven.GROUP_METHODS)
        self._as_view = {"post_backward_function", "post_backward_view"} <= chosen()
        self.aside = True
        self.hooks = Hooks(self)
        self._backward = -1  # the last backward that was looked at
        self._torchs_pre_backward: Any = None

    @classmethod
    def of(cls, fsdp2: Fsdp2) -> Stepper | None:
        """None where torch's methods are not known to equal these."""
        release, new = proven.find(fsdp2), new_dtensor(fsdp2)
        if release is None or new is None or fsdp2.reduce is None:
            return None
        return cls(fsdp2, release, new)

    def patches(self) -> list[tuple[Any, str, Wrapping]]:
        """What these methods replace: owner and attribute, and the wrapt wrapper."""
        found = [(self._cls, name, getattr(self, name)) for name in METHODS]
        return [*found, (self._fsdp2.state_class, _END, self._end_backward)]

    def _end_backward(
        self, wrapped: Any, state: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return None if roots.end_backward(self, state) else wrapped(*args, **kwargs)

    # -- whether ---------------------------------------------------------------------------

    def begin(self) -> None:
        """Remember what is in place now, after everything has been installed."""
        fsdp2 = self._fsdp2
        state_class = vars(fsdp2.state_class)
        of_some_releases = [name for name in proven.SOME_STATE_METHODS if name in state_class]
        state_methods = (*proven.STATE_METHODS, *of_some_releases)
        owners: tuple[tuple[type, tuple[str, ...]], ...] = (
            (self._cls, proven.GROUP_METHODS),
            (fsdp2.param_class, proven.PARAM_METHODS),
            (fsdp2.state_class, state_methods),
        )
        functions = []
        for owner, names in owners:
            found = [proven.torchs(owner, name) for name in names]
            if None in found:
                return  # somebody else's, which torch's methods call
            functions += found
        looks: list[tuple[Any, Callable[[Any], Any]]] = [(functions, _codes)]
        looks += [(vars(owner), operator.itemgetter(*names)) for owner, names in owners]
        looks.append((vars(fsdp2.group_module), operator.itemgetter(_REDUCE)))
        self._watched = [(where, look, look(where)) for where, look in looks]
        self._torchs_pre_backward = vars(fsdp2.state_class)["_pre_backward"]
        self.look_again()

    def stop(self) -> None:
        """Stand aside for good, and put torch's hooks back on live modules."""
        self._watched = []
        self.aside = True
        self.hooks.stop()

    def look_again(self) -> None:
        """Once for each forward and each backward: may the short way be gone?

        Not if somebody has patched what it goes around, or listens to torch's debug messages. Who
        does so in the middle of a pass is noticed at the next one.
        """
        fsdp2 = self._fsdp2
        self.aside = (
            not self._watched
            or self._is_changed()
            or (fsdp2.traceable and (fsdp2.compiled_autograd_enabled() or not fsdp2.skips_hooks()))
            or (self._logger is not None and self._logger.isEnabledFor(logging.DEBUG))
        )

    def _look_at_backward(self, backward: int) -> None:
        """``look_again``, if this is another backward."""
        if backward != self._backward or backward == -1:  # which it is for compiled autograd
            self._backward = backward
            self.look_again()

    def _is_changed(self) -> bool:
        try:
            # They are what they were, or else not equal: functions, and code of another place.
            return any(look(where) != found for where, look, found in self._watched)
        except KeyError:  # somebody took an attribute away
            return True

    def _steady(self, group: Any) -> Steady | None:
        """The group's steady state, if nothing forbids the short way at this moment."""
        if (
            self.aside
            or _profiling()
            or _modes()
            or functorch_active()
            or (self._type_checking is not None and self._type_checking())
        ):
            return None
        state = group.__dict__.get(ATTRIBUTE)
        if state is None:
            return None
        steady: Steady | None = state.steady
        return self._look_at(group, state) if steady is None else steady

    def hands_over(self, group: Any) -> bool:
        """Whether the group is steady, and its gradients become the sharded ones as they stand."""
        steady = _kept(group)
        return steady is not None and steady.hands_over

    def _blank_of(self, fsdp_param: Any) -> Any:
        if not self.release.constructs_dtensors:
            return None
        spec = fsdp_param._sharding_spec
        return spec, blank_dtensor(spec, fsdp_param._sharded_param_data)

    def _is_patched(self, group: Any) -> bool:
        """Whether somebody has put a method on this group. If so, its step is torch's for now."""
        if vars(group).keys().isdisjoint(self._methods):
            return False
        state = group.__dict__.get(ATTRIBUTE)
        if state is not None:
            state.unsettle_step()
        return True

    def torchs_pre_backward(self, state: Any) -> Any:
        """The ``_pre_backward`` that torch binds in forward, whatever is put on the state since."""
        return self._torchs_pre_backward.__get__(state, type(state))

    def is_torchs(self, state: Any) -> bool:
        """Whether an FSDP2 state has torch's own methods, with nobody's on top."""
        cls = type(state)
        if cls is not self._fsdp2.state_class and not all(
            of_class(cls, name) is vars(self._fsdp2.state_class).get(name)
            for name in _STATE_METHODS
        ):
            return False
        return vars(state).keys().isdisjoint(_STATE_METHODS)

    def reduction_pending(self, state: Any) -> bool:
        """Whether torch refuses a forward at this moment; from 2.15 on."""
        return self.release.leaf_accumulates and (
            state._state_ctx.gradient_reduction_pending
            or state._comm_ctx.active_gradient_reduction is not None
        )

    def _look_at(self, group: Any, state: GroupState) -> Steady | None:
        if not (state.settled and state.basis) or state.steady_tried:
            return None
        if type(group) is not self._cls:
            return None
        if not all(hasattr(fsdp_param, "param_dtype") for fsdp_param in group.fsdp_params):
            return None  # before torch's lazy initialization
        if self._is_patched(group):
            return None
        params = self._fsdp2.param_class
        if any(type(p) is not params or _PARAM_METHODS & vars(p).keys() for p in group.fsdp_params):
            return None
        with lock:
            # Another thread may have handed it back meanwhile, as a toggle does.
            if group.__dict__.get(ATTRIBUTE) is not state or not (state.settled and state.basis):
                return None
            state.steady_tried = True
            places = places_of(group, state)
            if places is not None:
                state.steady = Steady(group, state, places, self._blank_of)
            steady: Steady | None = state.steady
            return steady

    # -- before and after forward ----------------------------------------------------------

    def pre_forward(
        self, wrapped: Any, group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        result = None if len(args) != 3 else self.before_forward(group, args[1], args[2])
        return wrapped(*args, **kwargs) if result is None else result

    def before_forward(
        self,
        group: Any,
        inputs: tuple[Any, ...],
        keywords: dict[str, Any],
        on_input: Callable[[torch.Tensor], bool] | None = None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """``pre_forward``. None, with nothing changed, if torch has to.

        ``on_input`` may have a hook on the input call ``post_backward``, instead of a node.
        """
        steady = self._steady(group)
        if steady is None or not self._unshard(group, steady):
            return None
        entering = group._training_state is not self._forward
        group._training_state = self._forward
        if not entering and self.release.registers_once:
            return inputs, keywords
        found = inputs_with_grad(inputs, keywords) if self._as_view else None
        if found is not None:
            if not found or not torch.is_grad_enabled():
                return inputs, keywords
            if may_be_viewed(found):
                ((key, tensor),) = found
                if (
                    on_input is not None
                    and steady.hands_over
                    and _backward() == -1  # not when forward runs again in there
                    and on_input(tensor)
                ):
                    view = alias(tensor)
                else:
                    view = view_before(self.after_backward_of(group), tensor)
                if len(inputs) == 1 and not keywords:
                    return (view,), keywords
                return with_inputs(inputs, keywords, ((key, view),))
        outcome: tuple[tuple[Any, ...], dict[str, Any]]
        outcome = group._register_post_backward_hook(inputs, keywords)
        return outcome

    def after_backward_of(self, group: Any) -> Callable[[], None]:
        """What the autograd engine calls for ``post_backward``."""

        def post_backward() -> None:
            if _compiling() or not self.after_backward(group):
                group.post_backward()

        return post_backward

    def post_forward(
        self, wrapped: Any, group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if len(args) == 3 and self.after_forward(group):
            return args[2]
        return wrapped(*args, **kwargs)

    def after_forward(self, group: Any, *, looked: bool = False) -> bool:
        """``post_forward``, less the output. False, with nothing changed, if torch has to.

        ``looked``: the forward was begun by ``before_forward``, so that nothing forbids it.
        """
        steady = _kept(group) if looked else self._steady(group)
        if steady is None:
            return False
        if not self.release.stays_out_of_recompute or _backward() == -1:
            smaller = group.post_forward_mesh_info
            in_forward = group._training_state is self._forward
            if in_forward and smaller is not None and smaller is not group.mesh_info:
                return False
            if not in_forward or smaller is not None:
                if group._sharded_state is self._unsharded:
                    self._reshard(group, steady)
                elif group._sharded_state is not self._sharded:
                    return False
            order = group.comm_ctx.post_forward_order
            group._post_forward_indices.append(len(order))
            order.append(group)
        group._training_state = self._idle
        return True

    # -- before and after backward ---------------------------------------------------------

    def pre_backward(
        self, wrapped: Any, group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if len(args) == 1 and self.before_backward(group, prefetch=args[0]):
            return None
        return wrapped(*args, **kwargs)

    def before_backward(self, group: Any, *, prefetch: bool) -> bool:
        """``pre_backward``. False, with nothing changed, if torch has to."""
        backward = _backward()
        state = group.__dict__.get(ATTRIBUTE)
        if state is not None:
            state.backward = backward
        if group._training_state is self._pre_backward:
            return False
        self._look_at_backward(backward)
        steady = self._steady(group)
        if steady is None or (
            self.release.leaf_accumulates and group._fsdp_params_with_wider_grad_dtype
        ):
            return False
        wanted = group.unshard_in_backward or group._all_gather_result is not None
        if wanted and not self._unshard(group, steady):
            return False
        group._training_state = self._pre_backward
        if prefetch:
            if self.release.shares_modules and group._num_param_groups > 1:
                group._backward_prefetch()
            elif group._post_forward_indices:
                index = group._post_forward_indices.pop()
                if index > 0:
                    self._prefetch(group, group.comm_ctx.post_forward_order[index - 1])
        return True

    def is_in_backward(self, group: Any) -> bool:
        """Whether the backward that runs at this moment came by the group's output."""
        state = group.__dict__.get(ATTRIBUTE)
        if state is None:  # switched off meanwhile
            return group._training_state is self._pre_backward
        return bool(state.backward == _backward())

    def post_backward(
        self, wrapped: Any, group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return None if self.after_backward(group) else wrapped(*args, **kwargs)

    def after_backward(self, group: Any) -> bool:
        """``post_backward``. False if torch has to, perhaps for some parameters only."""
        self._look_at_backward(_backward())
        if self._is_patched(group):
            return False
        steady = self._steady(group)
        if steady is None or not self._may_hand_over(group, steady):
            return False
        dtype, sharded, new = steady.dtype, self._sharded, self._new
        leaf_accumulates = self.release.leaf_accumulates
        given, nbytes, odd = 0, 0, False
        with _by_torch():
            for (fsdp_param, param, _, size, module, name, more), blank in zip(
                steady.slots, steady.blanks
            ):
                sharded_param = fsdp_param.sharded_param
                grad = param.grad
                if grad is not None:
                    if (
                        type(grad) is not _Tensor
                        or grad.dtype is not dtype
                        or grad.layout is not _strided
                        or grad.requires_grad
                        or sharded_param._post_accumulate_grad_hooks
                        or (leaf_accumulates and fsdp_param._has_sharded_grad_dtype_override)
                    ):
                        odd = True
                        break
                    param.grad = None
                    # As in ``reduce``: contiguous, and nobody else can write to it. The storage is
                    # held by the gradient and by ``storage``.
                    storage = grad.untyped_storage()
                    if _holders(storage._cdata) > 2 or not grad.is_contiguous():
                        grad = grad.clone(memory_format=torch.contiguous_format)
                    existing = sharded_param.grad
                    if existing is None:
                        spec = fsdp_param._sharding_spec
                        if blank is None or blank[0] is not spec:
                            sharded_param.grad = new(grad, spec)
                        else:
                            made = blank[1]()
                            made._spec = spec
                            made._local_tensor = grad
                            sharded_param.grad = made
                    else:
                        existing._local_tensor += grad
                    given += 1
                    nbytes += size
                module._parameters[name] = sharded_param
                if more:
                    _register(more, sharded_param)
                fsdp_param.sharded_state = sharded
        if given:
            counters.reduce_scatters += 1
            counters.reduce_scatter_bytes += nbytes
        if odd:
            # Parameters do not depend on each other where nothing is flattened: those before it
            # have no gradient left, and torch's method goes on from here, in the same order.
            return False
        group._training_state = self._post_backward
        group._sharded_state = sharded
        if given:
            self._leave_event(group)
        if leaf_accumulates:
            group._post_backward_pending = False
        return True

    def _may_hand_over(self, group: Any, steady: Steady) -> bool:
        release = self.release
        return (
            steady.hands_over
            and group._sharded_state is self._unsharded
            and group.reduce_grads
            and group.reshard_after_backward
            and group._all_gather_result is None
            and group._all_reduce_hook is None
            and group._all_reduce_hook_stream is None
            and group._partial_reduce_output is None
            and group.all_reduce_grads
            and group.mesh_info is steady.mesh_info
            and group._reduce_dtype is steady.reduce_dtype
            and _is_one(getattr(group, release.factor))
            # Inputs of another group's reduce-scatter, which torch's method lets go of.
            and not getattr(group.comm_ctx, release.inputs)
            and not (len(group.modules) > 1 and group._training_state is self._forward)
            and not getattr(group, "reduce_scatter_unused_params", False)
            and not (release.leaf_accumulates and group._fsdp_params_with_wider_grad_dtype)
            and not torch.is_grad_enabled()
            and frame_callback() is None
        )

    def finalize_backward(
        self, wrapped: Any, group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return None if self.finish_backward(group) else wrapped(*args, **kwargs)

    def finish_backward(self, group: Any) -> bool:
        """``finalize_backward``. False, with nothing changed, if torch has to."""
        steady = _kept(group)
        if (
            steady is None
            or self.aside
            or not steady.hands_over
            or group._all_gather_result is not None
            or group._post_reduce_event is not None
            or group._all_reduce_state is not None
            or (self.release.waits_for_streams and group.comm_ctx._last_post_reduce_events)
        ):
            return False
        group._post_forward_indices.clear()
        return True

    def _leave_event(self, group: Any) -> None:
        """Leave the event that finalization waits for."""
        if group._post_reduce_event is not None or group._all_reduce_state is not None:
            group._wait_for_post_backward()
        if group.device.type != "cpu":
            stream = torch.get_device_module(group.device).current_stream()
            group._post_reduce_event = stream.record_event()
            if self.release.waits_for_streams:
                group.comm_ctx._last_post_reduce_events[stream] = group._post_reduce_event

    # -- switching -------------------------------------------------------------------------

    def _unshard(self, group: Any, steady: Steady) -> bool:
        """``unshard`` and ``wait_for_unshard``. False, with nothing changed, if torch has to."""
        if self._is_patched(group):
            return False
        pending = group._all_gather_result
        if group._sharded_state is self._unsharded:
            return pending is None
        if (
            group._sharded_state is not self._sharded
            or not (pending is None or pending is steady.pending)
            or group.comm_ctx.all_gather_state is not None
        ):
            return False
        unsharded, classes = self._unsharded, steady.classes
        with lock:
            state = group.__dict__.get(ATTRIBUTE)
            if state is None or state.steady is not steady:
                return False  # handed back by another thread
            with _by_torch():
                for fsdp_param, param, data, _, module, name, more in steady.slots:
                    if (
                        fsdp_param._sharded_param_data is not data  # the storage was swapped
                        or type(module) not in classes
                        or (more and any(type(where) not in classes for where, _ in more))
                    ):
                        self._reshard(group, steady)
                        state.steady = None  # for the rest of this pass
                        return False
                    requires_grad = fsdp_param.sharded_param.requires_grad
                    if param.requires_grad is not requires_grad:
                        param.requires_grad_(requires_grad)
                    module._parameters[name] = param
                    if more:
                        _register(more, param)
                    fsdp_param.sharded_state = unsharded
            group._sharded_state = unsharded
            group._all_gather_result = None
        counters.all_gathers += 1
        counters.all_gather_bytes += steady.nbytes
        counters.shared += len(steady.slots)
        return True

    def _reshard(self, group: Any, steady: Steady) -> None:
        """Nothing to free: the memory is the sharded parameters'."""
        sharded = self._sharded
        for fsdp_param, _, _, _, module, name, more in steady.slots:
            sharded_param = fsdp_param.sharded_param
            module._parameters[name] = sharded_param
            if more:
                _register(more, sharded_param)
            fsdp_param.sharded_state = sharded
        group._sharded_state = sharded

    def _prefetch(self, group: Any, target: Any) -> None:
        """Leave a pending result on the group that backward needs next, as ``unshard`` does."""
        steady = _kept(target)
        if steady is not None and not self._is_patched(target):
            with lock:
                if _kept(target) is steady:
                    if (
                        target._all_gather_result is None
                        and target._sharded_state is self._sharded
                        and target.unshard_in_backward
                    ):
                        target._all_gather_result = steady.pending
                    return
        group._prefetch_unshard(target, "backward")


_REDUCE = "foreach_reduce"
_END = "_root_post_backward_final_callback"


def _kept(group: Any) -> Steady | None:
    """The group's steady state as it was last found, whatever there is at this moment."""
    state = group.__dict__.get(ATTRIBUTE)
    steady: Steady | None = None if state is None else state.steady
    return steady


def _codes(functions: list[Any]) -> list[Any]:
    return [function.__code__ for function in functions]


def _register(places: Any, param: Any) -> None:
    for module, name in places:
        module._parameters[name] = param


def _is_one(factor: Any) -> bool:
    # 2.7 keeps a reduction operator there.
    return factor is None or (type(factor) in (int, float) and factor == 1)


METHODS = ("pre_forward", "post_forward", "pre_backward", "post_backward", "finalize_backward")
