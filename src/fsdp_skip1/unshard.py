"""Carries the plan out before forward and backward: ``unshard`` and ``wait_for_unshard``.

[Note: two steps]
``unshard`` only leaves a pending ``AllGatherResult``, and ``wait_for_unshard`` switches the
group to unsharded. Switching in ``unshard`` would be wrong: backward prefetch can reach a group
whose backward is already over, nobody would wait for that unshard or reshard it, and torch's
finalization, which clears a pending result, would find nothing to clear.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from fsdp_skip1.counters import counters
from fsdp_skip1.memory import is_shared, make_private, prepare_buffers, share
from fsdp_skip1.plan import How, plan_group, unsharded_dtype
from fsdp_skip1.releases import functorch_active, preserve_versions

if TYPE_CHECKING:
    from collections.abc import Callable

    from fsdp_skip1.plan import GroupPlan
    from fsdp_skip1.releases import Fsdp2

# The one attribute that the plugin adds to a parameter group; gone after ``disable()``.
ATTRIBUTE = "_fsdp_skip1"

# Held while memory changes hands, so that a toggle in another thread finds each group either
# before an unshard or after it. Reentrant: an extension's hook may itself call ``disable()``.
_lock = threading.RLock()
_adopted: weakref.WeakSet[Any] = weakref.WeakSet()


def _new_lock() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_lock)


class GroupState:
    """What the plugin keeps on one parameter group.

    Attributes:
        plan: the decision that is being carried out.
        pending: the result object that stands for an unshard of ours nobody has waited for yet.
        basis: for each parameter what the plan was made for: the sharded storage's flat tensor
            and ``param_dtype``. Other objects there mean that the storage was swapped.
        settled: every parameter shares memory, so that nothing is left to do at an unshard.
    """

    __slots__ = ("basis", "nbytes", "pending", "places", "places_tried", "plan", "settled")

    def __init__(self, plan: GroupPlan, pending: Any) -> None:
        self.plan = plan
        self.pending = pending
        self.basis: list[tuple[Any, torch.Tensor, torch.dtype | None]] = []  # not planned yet
        self.settled = False
        self.nbytes = 0
        self.places: Any = None  # where its parameters are registered, for the trims
        self.places_tried = False


class Unsharder:
    """``unshard`` and ``wait_for_unshard`` for groups whose shard mesh has size 1.

    One lives as long as the plugin is on. ``original_unshard`` is torch's (or whatever was
    installed before us), for a pending unshard that has to become a real one.
    """

    def __init__(
        self,
        fsdp2: Fsdp2,
        *,
        zero_copy: bool,
        on_adopt: Callable[[Any, GroupPlan], str | None],
    ) -> None:
        self.fsdp2 = fsdp2
        self._zero_copy = zero_copy
        self._on_adopt = on_adopt
        self._stopped = False

    # -- the two methods -------------------------------------------------------------------

    def unshard(
        self, wrapped: Callable[..., Any], group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        state = group.__dict__.get(ATTRIBUTE)
        if state is None:
            state = self._adopt(group)
        if state.plan.left_to_torch is not None or self._must_stand_aside(group):
            return wrapped(*args, **kwargs)
        fsdp2 = self.fsdp2
        if group._all_gather_result is not None or group._sharded_state is fsdp2.unsharded:
            return None
        if group._sharded_state is not fsdp2.sharded:  # resharded to a smaller mesh
            return wrapped(*args, **kwargs)
        if not group.unshard_in_backward and group._training_state is fsdp2.pre_backward:
            return None
        group._all_gather_result = state.pending
        return None

    def wait_for_unshard(
        self, wrapped: Callable[..., Any], group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        state = group.__dict__.get(ATTRIBUTE)
        if state is None or state.plan.left_to_torch is not None:
            return wrapped(*args, **kwargs)
        if group._all_gather_result is None:
            return None
        with _lock:
            # Looked at under the lock: ``stop`` turns a pending unshard of ours into a real one.
            if group._all_gather_result is state.pending and not self._stopped:
                self._switch(group, state)
                return None
            self._hand_back(group)
        return wrapped(*args, **kwargs)

    def _must_stand_aside(self, group: Any) -> bool:
        # 2.6 - 2.11: torch's own method has to be traced while compiled autograd is on.
        if not self.fsdp2.compiled_autograd_enabled():
            return False
        self._hand_back(group)
        return True

    # -- carrying out ----------------------------------------------------------------------

    def _switch(self, group: Any, state: GroupState) -> None:
        if torch.autograd._profiler_enabled():
            label = group._with_fqn("FSDP::all_gather (skipped: shard size 1)")
            with torch.profiler.record_function(label):
                self._fill_if_needed(group, state)
        else:
            self._fill_if_needed(group, state)
        group._to_unsharded()
        group._all_gather_result = None
        counters.all_gathers += 1
        counters.all_gather_bytes += state.nbytes

    def _fill_if_needed(self, group: Any, state: GroupState) -> None:
        if group._training_state is self.fsdp2.forward:
            self.fsdp2.release_all_gather_state(group)
        if state.settled and self._basis_holds(state):
            counters.shared += len(state.basis)
        else:
            self._fill(group, state)

    @staticmethod
    def _basis_holds(state: GroupState) -> bool:
        for fsdp_param, data, param_dtype in state.basis:
            if fsdp_param._sharded_param_data is not data or (
                fsdp_param.param_dtype is not param_dtype
            ):
                return False
        return bool(state.basis)

    def _fill(self, group: Any, state: GroupState) -> None:
        """Give every parameter of the group its data, by the plan, with one copy a dtype pair."""
        # Parameters made in inference mode could never train, see pytorch PR 197327; and under
        # functorch every tensor made here would belong to the transform.
        with torch.inference_mode(False), torch.no_grad():
            if functorch_active():
                with torch._C._DisableFuncTorch():
                    self._fill_now(group, state)
            else:
                self._fill_now(group, state)

    def _fill_now(self, group: Any, state: GroupState) -> None:
        self.fsdp2.renew_dtypes(group)
        if not self._basis_holds(state) or any(p.provisional for p in state.plan.params):
            self._replan(group, state)
        copies = Copies()
        to_build: list[Any] = []
        for fsdp_param, param_plan in zip(group.fsdp_params, state.plan.params):
            how = param_plan.how
            if how is How.SHARE:
                if not (is_shared(fsdp_param) and _sees(fsdp_param)):
                    share(fsdp_param)
                counters.shared += 1
                continue
            counters.copied += 1
            data = fsdp_param._sharded_param_data
            if how is How.EXTENSION:
                inputs = fsdp_param.all_gather_inputs
                buffers = prepare_buffers(
                    fsdp_param, [t.numel() for t in inputs], [t.dtype for t in inputs]
                )
                for buffer, source in zip(buffers, inputs):
                    copies.add(buffer, source)
                to_build.append(fsdp_param)
                continue
            if how is How.TRANSFER or type(data) is not torch.Tensor:
                source = fsdp_param.all_gather_inputs[0]
            else:
                source = data.view(-1)
            buffers = prepare_buffers(fsdp_param, [data.numel()], [unsharded_dtype(fsdp_param)])
            copies.add(buffers[0], source)
            if not hasattr(fsdp_param, "_unsharded_param"):
                to_build.append(fsdp_param)
        copies.run()
        # An extension builds its parameter from the data, so this comes after the copy.
        for fsdp_param in to_build:
            fsdp_param.init_unsharded_param()
        state.settled = all(p.how is How.SHARE for p in state.plan.params)

    def _replan(self, group: Any, state: GroupState) -> None:
        state.plan = plan_group(self.fsdp2, group, zero_copy=self._zero_copy)
        state.basis = [
            (p, p._sharded_param_data, getattr(p, "param_dtype", None)) for p in group.fsdp_params
        ]
        state.nbytes = sum(d.numel() * d.element_size() for _, d, _ in state.basis)
        state.settled = False

    # -- life of a group -------------------------------------------------------------------

    def _adopt(self, group: Any) -> GroupState:
        """Decide about a group at its first use; remember it so that it can be restored."""
        with _lock:
            plan = plan_group(self.fsdp2, group, zero_copy=self._zero_copy)
            refusal = self._on_adopt(group, plan)
            if refusal is not None and plan.left_to_torch is None:
                plan = type(plan)(plan.shard_size, plan.replicas, (), left_to_torch=refusal)
            pending = None if plan.left_to_torch is not None else self.fsdp2.pending(group)
            state = GroupState(plan, pending)
            group.__dict__[ATTRIBUTE] = state
            _adopted.add(group)
            return state

    def _hand_back(self, group: Any) -> None:
        """Leave the group as stock would have it, and let torch go on from there."""
        with _lock:
            state = group.__dict__.get(ATTRIBUTE)
            if state is None or state.plan.left_to_torch is not None:
                return
            filled = group._sharded_state is self.fsdp2.unsharded
            for fsdp_param in group.fsdp_params:
                make_private(fsdp_param, filled=filled)
            state.settled = False

    def stop(self, unshard: Callable[[Any], Any]) -> None:
        """Restore every group that was adopted, and forget it.

        ``unshard`` is torch's own method: where an unshard of ours is pending, it issues the
        real one, since the releases before 2.9 cannot finish ours.
        """
        with _lock:
            self._stopped = True
            for group in list(_adopted):
                state = group.__dict__.get(ATTRIBUTE)
                if state is None:
                    continue
                self._hand_back(group)
                del group.__dict__[ATTRIBUTE]
                if state.pending is not None and group._all_gather_result is state.pending:
                    group._all_gather_result = None
                    unshard(group)
            _adopted.clear()


class Copies:
    """The copies of one unshard, one multi-tensor call for each pair of dtypes and devices."""

    __slots__ = ("_pairs",)

    def __init__(self) -> None:
        self._pairs: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        key = (target.dtype, source.dtype, source.device)
        targets, sources = self._pairs.setdefault(key, ([], []))
        targets.append(target)
        sources.append(source)

    def run(self) -> None:
        for targets, sources in self._pairs.values():
            with preserve_versions(targets):
                torch._foreach_copy_(targets, sources)


def _sees(fsdp_param: Any) -> bool:
    """Whether the unsharded parameter looks at today's sharded storage."""
    unsharded = fsdp_param._unsharded_param
    local = getattr(unsharded, "_local_tensor", unsharded)
    data = fsdp_param._sharded_param_data
    return bool(local.data_ptr() == data.data_ptr() and local.dtype == data.dtype)


def adopted_groups() -> list[Any]:
    """The parameter groups that the plugin has seen since it was switched on."""
    return list(_adopted)
