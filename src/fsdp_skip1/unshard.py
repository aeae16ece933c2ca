"""Carries the plan out before forward and backward: ``unshard`` and ``wait_for_unshard``.

[Note: two steps]
``unshard`` only leaves a pending ``AllGatherResult``, and ``wait_for_unshard`` switches the
group to unsharded. Switching in ``unshard`` would be wrong: backward prefetch can reach a group
whose backward is already over, nobody would wait for that unshard or reshard it, and torch's
finalization, which clears a pending result, would find nothing to clear.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from fsdp_skip1 import transfer
from fsdp_skip1.counters import counters
from fsdp_skip1.memory import is_shared, make_private, prepare_buffers, share
from fsdp_skip1.notices import warn_once
from fsdp_skip1.plan import GroupPlan, How, plan_group, unsharded_dtype
from fsdp_skip1.releases import functorch_active, preserve_versions
from fsdp_skip1.transfer import Staged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from fsdp_skip1.releases import Fsdp2

# The one attribute that the plugin adds to a parameter group; gone after ``disable()``.
ATTRIBUTE = "_fsdp_skip1"

# Held while memory changes hands, so that a toggle in another thread finds each group either
# before an unshard or after it. Reentrant: an extension's hook may itself call ``disable()``.
lock = threading.RLock()
_adopted: weakref.WeakSet[Any] = weakref.WeakSet()

if hasattr(os, "register_at_fork"):
    # In place, since others keep it: whoever held it does not exist in the child.
    os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]


class GroupState:
    """What the plugin keeps on one parameter group.

    Attributes:
        plan: the decision that is being carried out.
        pending: the result object that stands for an unshard of ours nobody has waited for yet;
            where something is on its way from the host, another one that holds a ``Staged``.
        basis: for each parameter what the plan was made for: the sharded storage's flat tensor
            and ``param_dtype``. Other objects there mean that the storage was swapped.
        settled: every parameter shares memory, so that nothing is left to do at an unshard.
        proof: somebody else's ``wait_for_unshard`` that was seen to call ours for this group.
        trials: how often torch's own unshard was begun in the hope of a proof.
        places: where its parameters are registered, for the trims.
        steady: what ``steady`` keeps of a settled group, until the plan changes.
        backward: the graph task of its last ``pre_backward``.
    """

    __slots__ = (
        "backward",
        "basis",
        "moving",
        "nbytes",
        "pending",
        "places",
        "places_tried",
        "plan",
        "proof",
        "settled",
        "steady",
        "steady_tried",
        "trials",
    )

    def __init__(self, plan: GroupPlan, pending: Any) -> None:
        self.plan = plan
        self.pending = pending
        self.basis: list[tuple[Any, torch.Tensor, torch.dtype | None]] = []  # not planned yet
        self.settled = False
        self.nbytes = 0
        self.moving: list[Any] = []  # offloaded parameters: ``unshard`` transfers them
        self.places: Any = None
        self.places_tried = False
        self.steady: Any = None
        self.steady_tried = False
        self.backward = -1
        self.proof: Any = None
        self.trials = 0

    def unsettle(self) -> None:
        """What was settled has to be looked at again, at the next unshard."""
        self.settled = False
        self.unsettle_step()

    def unsettle_step(self) -> None:
        """The step has to be torch's for now."""
        self.steady, self.steady_tried = None, False


class Unsharder:
    """``unshard`` and ``wait_for_unshard`` for groups whose shard mesh has size 1.

    One lives as long as the plugin is on. ``on_adopt`` is asked once for each group; it may
    answer with a reason to leave the group to torch.
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
            state = self.adopt(group)
        if state.plan.left_to_torch is not None or self._must_stand_aside(group):
            return wrapped(*args, **kwargs)
        fsdp2 = self.fsdp2
        if group._all_gather_result is not None or group._sharded_state is fsdp2.unsharded:
            return None
        if group._sharded_state is not fsdp2.sharded:  # resharded to a smaller mesh
            return wrapped(*args, **kwargs)
        if not group.unshard_in_backward and group._training_state is fsdp2.pre_backward:
            return None
        with lock:
            if not self._stopped:
                group._all_gather_result = self._begin(group, state, *args, **kwargs)
                return None
        return wrapped(*args, **kwargs)

    def wait_for_unshard(
        self, wrapped: Callable[..., Any], group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        state = group.__dict__.get(ATTRIBUTE)
        if state is None or state.plan.left_to_torch is not None:
            return wrapped(*args, **kwargs)
        with lock:
            # Looked at under the lock: ``stop`` turns a pending unshard of ours into a real one.
            if group._all_gather_result is None:
                return None
            if _is_pending(group, state) and not self._stopped:
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
            return
        staged = _staged(group)
        with _creating_parameters():
            if staged is None or not self._basis_holds(state):
                staged = self._stage(group, state, in_order=True)
            if staged is None:
                self._fill(group, state, {})
                return
            current = torch.get_device_module(group.device).current_stream()
            staged.wait(current)
            try:
                self._fill(group, state, staged.inputs)
            finally:
                staged.release(current)

    @staticmethod
    def _basis_holds(state: GroupState) -> bool:
        for fsdp_param, data, param_dtype in state.basis:
            if fsdp_param._sharded_param_data is not data or (
                fsdp_param.param_dtype is not param_dtype
            ):
                return False
        return bool(state.basis)

    def _begin(self, group: Any, state: GroupState, async_op: bool = False) -> Any:
        """The pending result of an unshard; what has to cross the bus is on its way by then."""
        if not state.moving:
            return state.pending
        # As torch has it: implicit prefetching alone is not ordered behind the current stream.
        implicit = group._training_state in (self.fsdp2.forward, self.fsdp2.pre_backward)
        with _creating_parameters():
            staged = self._stage(group, state, in_order=async_op or not implicit)
        return state.pending if staged is None else self.fsdp2.pending(group, staged)

    def _stage(self, group: Any, state: GroupState, *, in_order: bool) -> Staged | None:
        """Bring the plan up to date, and queue the transfers that it asks for."""
        self.fsdp2.renew_dtypes(group)
        if not self._basis_holds(state) or any(p.provisional for p in state.plan.params):
            self._replan(group, state)
        return transfer.begin(group, state.moving, in_order=in_order) if state.moving else None

    @staticmethod
    def _fill(group: Any, state: GroupState, staged: dict[Any, list[torch.Tensor]]) -> None:
        """Give each parameter its memory, by the plan."""
        fill = Fill()
        for fsdp_param, param_plan in zip(group.fsdp_params, state.plan.params):
            if param_plan.how is How.SHARE:
                if not (is_shared(fsdp_param) and _sees(fsdp_param)):
                    share(fsdp_param)
                counters.shared += 1
            else:
                fill.add(fsdp_param, param_plan.how, staged.get(fsdp_param))
                counters.copied += 1
        fill.copy()
        fill.build()
        state.settled = all(p.how is How.SHARE for p in state.plan.params)

    def _replan(self, group: Any, state: GroupState) -> None:
        state.plan = plan_group(self.fsdp2, group, zero_copy=self._zero_copy)
        state.basis = [
            (p, p._sharded_param_data, getattr(p, "param_dtype", None)) for p in group.fsdp_params
        ]
        state.nbytes = sum(d.numel() * d.element_size() for _, d, _ in state.basis)
        state.unsettle()
        state.moving = _moving(group, state.plan)

    # -- life of a group -------------------------------------------------------------------

    def adopt(self, group: Any) -> GroupState:
        """Decide about a group at its first use; remember it so that it can be restored."""
        with lock:
            state: GroupState | None = group.__dict__.get(ATTRIBUTE)
            if state is not None:
                return state
            if self._stopped:
                return GroupState(GroupPlan(0, 1, (), left_to_torch="the plugin is off"), None)
            try:
                plan = plan_group(self.fsdp2, group, zero_copy=self._zero_copy)
            except Exception as error:
                reason = f"it does not look as expected ({type(error).__name__}: {error})"
                plan = GroupPlan(0, 1, (), left_to_torch=reason, unexpected=True)
            refusal = self._on_adopt(group, plan)
            if refusal is not None and plan.left_to_torch is None:
                plan = type(plan)(plan.shard_size, plan.replicas, (), left_to_torch=refusal)
            pending = None if plan.left_to_torch is not None else self.fsdp2.pending(group)
            state = GroupState(plan, pending)
            state.moving = _moving(group, plan)
            group.__dict__[ATTRIBUTE] = state
            _adopted.add(group)
            return state

    def hand_back(self, group: Any) -> None:
        """Let torch unshard the group, the next time at least; undoes an unshard of ours."""
        with lock:
            state = group.__dict__.get(ATTRIBUTE)
            if state is None:
                return
            if _is_pending(group, state):
                group._all_gather_result = None
            self._hand_back(group)

    def _hand_back(self, group: Any) -> None:
        """Leave the group as stock would have it, and let torch go on from there."""
        with lock:
            state = group.__dict__.get(ATTRIBUTE)
            if state is None or state.plan.left_to_torch is not None:
                return
            if not state.basis:  # ours has filled nothing since the last time
                return
            filled = group._sharded_state is self.fsdp2.unsharded
            for fsdp_param in group.fsdp_params:
                make_private(fsdp_param, filled=filled)
            state.unsettle()
            state.basis = []  # autograd may hold on to the private buffer: look at it again

    def stop(self, unshard: Callable[[Any], Any]) -> None:
        """Restore every group that was adopted, and forget it.

        ``unshard`` is torch's own method: where an unshard of ours is pending, it issues the
        real one, since the releases before 2.9 cannot finish ours.
        """
        with lock:
            self._stopped = True
            for group in list(_adopted):
                try:
                    self._release(group, unshard)
                except Exception as error:
                    warn_once(
                        "restore-failed",
                        f"fsdp_skip1 could not restore {group!r}: {type(error).__name__}: {error}",
                    )
            _adopted.clear()

    def _release(self, group: Any, unshard: Callable[[Any], Any]) -> None:
        state = group.__dict__.get(ATTRIBUTE)
        if state is None:
            return
        try:
            self._hand_back(group)
        finally:
            del group.__dict__[ATTRIBUTE]
            if _is_pending(group, state):
                group._all_gather_result = None
                unshard(group)


def _moving(group: Any, plan: GroupPlan) -> list[Any]:
    return [p for p, param_plan in zip(group.fsdp_params, plan.params) if param_plan.moves]


def _staged(group: Any) -> Staged | None:
    output = group._all_gather_result.all_gather_output
    return output if isinstance(output, Staged) else None


def _is_pending(group: Any, state: GroupState) -> bool:
    """Whether the group waits for the end of an unshard of ours."""
    result = group._all_gather_result
    return result is not None and (result is state.pending or _staged(group) is not None)


class Fill:
    """The copies of one unshard, one multi-tensor call for each pair of dtypes and devices."""

    __slots__ = ("_builds", "_copies")

    def __init__(self) -> None:
        self._copies: _Pairs = {}
        self._builds: list[Any] = []

    def add(self, fsdp_param: Any, how: How, inputs: Sequence[torch.Tensor] | None) -> None:
        """Allocate a parameter's buffers; ``inputs`` fill them, if it was transferred."""
        if inputs is None:
            data = fsdp_param._sharded_param_data
            plain = how is not How.EXTENSION and type(data) is torch.Tensor
            inputs = [data.view(-1)] if plain else fsdp_param.all_gather_inputs  # calls a hook
        extension = how is How.EXTENSION
        dtypes = [t.dtype for t in inputs] if extension else [unsharded_dtype(fsdp_param)]
        buffers = prepare_buffers(fsdp_param, [t.numel() for t in inputs], dtypes)
        for buffer, source in zip(buffers, inputs):
            targets, sources = self._copies.setdefault(
                (buffer.dtype, source.dtype, source.device), ([], [])
            )
            targets.append(buffer)
            sources.append(source)
        if extension or not hasattr(fsdp_param, "_unsharded_param"):
            self._builds.append(fsdp_param)

    def copy(self) -> None:
        """Queue every copy on the current stream."""
        for targets, sources in self._copies.values():
            with preserve_versions(targets):
                torch._foreach_copy_(targets, sources)

    def build(self) -> None:
        """Make the unsharded parameters, where there is none; an extension's from its data."""
        for fsdp_param in self._builds:
            fsdp_param.init_unsharded_param()


_Pairs = dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]]


@contextlib.contextmanager
def _creating_parameters() -> Iterator[None]:
    """The modes in which an unsharded parameter is made and filled.

    One made in inference mode could never train (pytorch PR 197327), and under functorch every
    tensor made here would belong to the transform.
    """
    with torch.inference_mode(False), torch.no_grad():
        if functorch_active():
            with torch._C._DisableFuncTorch():
                yield
        else:
            yield


def _sees(fsdp_param: Any) -> bool:
    """Whether the unsharded parameter looks at today's sharded storage."""
    unsharded = fsdp_param._unsharded_param
    local = getattr(unsharded, "_local_tensor", unsharded)
    data = fsdp_param._sharded_param_data
    return bool(local.data_ptr() == data.data_ptr() and local.dtype == data.dtype)


def adopted_groups() -> list[Any]:
    """The parameter groups that the plugin has seen since it was switched on."""
    return list(_adopted)
