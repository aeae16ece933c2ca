"""Where the plugin is installed and removed.

Patched are two methods of ``FSDPParamGroup``, the function ``foreach_reduce`` in each module
that holds it, one method of ``FSDPState``, and what ``trims`` asks for. Each replacement is a
wrapper that asks at call time whether the plugin is on; off, it only passes through.

[Note: other patchers]
Whose wrapper is outside and whose inside depends on who came first.

*Before us.* A wrapper around torch's method is wrapped again: a group of shard size 1 goes
around it, every other group through it. A method that does not lead to torch's own is left alone,
and so is all of FSDP2 with it.

*After us.* torch's finishing of an unshard may choke on one of ours (2.6 - 2.8), so ours is only
begun where ours will finish it. Whether somebody else's ``wait_for_unshard`` calls ours cannot
be known from looking at it, so it is tried out with an unshard of torch's own, group by group.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from fsdp_skip1 import frames, others, roots, trims
from fsdp_skip1.counters import counters
from fsdp_skip1.notices import announce, heard, log, rank, warn_once
from fsdp_skip1.plan import shard_mesh_size
from fsdp_skip1.points import PatchPoint, is_ours, without_ours
from fsdp_skip1.reduce import Reducer
from fsdp_skip1.releases import NotUnderstood, groups_of, read
from fsdp_skip1.steady import Stepper
from fsdp_skip1.unshard import ATTRIBUTE, Unsharder, adopted_groups

if TYPE_CHECKING:
    from collections.abc import Callable

    from fsdp_skip1.plan import GroupPlan
    from fsdp_skip1.points import Wrapping
    from fsdp_skip1.releases import Fsdp2

_unsharder: Unsharder | None = None
_reducer: Reducer | None = None
_stepper: Stepper | None = None
_options: dict[str, bool] = {}
# What is replaced at this moment; while off, what somebody else's wrapper still leads to.
_points: list[PatchPoint] = []
# Everything that was ever replaced, see [Note: soft undo].
_places: dict[tuple[int, str], PatchPoint] = {}
# Our wrapper of ``wait_for_unshard``, by the class that it is on.
_waits: dict[type, Any] = {}
# Classes with a method whose code somebody has replaced under our wrapper.
_swapped: set[type] = set()
# What was found in place of ours, and reported.
_judged: dict[PatchPoint, Any] = {}
# Held by whoever adds or removes points.
_changing = threading.RLock()

_WAIT = "wait_for_unshard"
_ESSENTIAL = ("unshard", _WAIT, "foreach_reduce")

if hasattr(os, "register_at_fork"):
    # As with ``unshard.lock``.
    os.register_at_fork(after_in_child=_changing._at_fork_reinit)  # type: ignore[attr-defined]


def install(*, zero_copy: bool) -> bool:
    """Patch the FSDP2 that is loaded. Returns whether it took; never raises."""
    with _changing:
        if _unsharder is not None:
            if _options.get("zero_copy") == zero_copy and all(p.holds() for p in _points):
                return True
            remove()
        try:
            _install(look(), zero_copy)
        except NotUnderstood as error:
            warn_once(
                f"not-understood:{error.found}",
                f"fsdp_skip1 leaves torch {torch.__version__} as it is: found {error.found}, "
                f"expected {error.expected}. Training goes on without the plugin.",
            )
            return False
        except Exception as error:
            remove()
            warn_once(
                "install-failed",
                f"fsdp_skip1 could not be switched on ({type(error).__name__}: {error}). "
                "Training goes on without the plugin.",
            )
            return False
        return True


def look() -> Fsdp2:
    """The FSDP2 that is loaded, if it can be patched. Changes nothing.

    Raises:
        NotUnderstood: if it cannot.
    """
    return read()


def running() -> Fsdp2 | None:
    """The FSDP2 that is patched at this moment, or None. For reports."""
    unsharder = _unsharder
    return None if unsharder is None else unsharder.fsdp2


def points() -> tuple[PatchPoint, ...]:
    """What is replaced at this moment. For reports."""
    return tuple(_points)


def steps_in_one_piece() -> bool:
    """Whether this torch is one whose methods ``steady`` stands in for. For reports."""
    return _stepper is not None


def taken_over(group: Any) -> str | None:
    """Why an unshard of this group does not come to ours, or None. For reports."""
    for point in _points:
        if (
            point.name in ("unshard", _WAIT)
            and isinstance(group, point.owner)
            and not point.holds()
        ):
            return f"{point.name} was replaced by {others.describe(point.current)}"
    method = _method_of(group, _WAIT)
    state = group.__dict__.get(ATTRIBUTE)
    if _ours_waits(group) or is_ours(method) or state is None or state.proof is method:
        return None
    return f"{_WAIT} was wrapped by {others.describe(method)}, which has not called ours yet"


def _install(fsdp2: Fsdp2, zero_copy: bool) -> None:
    global _unsharder, _reducer, _stepper
    _tidy_places()
    wanted: list[tuple[Any, str, Callable[[PatchPoint], Wrapping]]] = []
    for cls in fsdp2.group_classes:
        wanted += [(cls, "unshard", _unshard), (cls, _WAIT, _wait_for_unshard)]
    if fsdp2.reduce is not None:
        wanted += [(module, "foreach_reduce", _foreach_reduce) for module in fsdp2.reduce_modules]
    else:
        warn_once(
            f"reduce:{fsdp2.reduce_reason}",
            f"fsdp_skip1 leaves the reduction of gradients alone: {fsdp2.reduce_reason}.",
        )
    wanted.append((fsdp2.state_class, "_root_pre_forward", _root_pre_forward))
    stepper = Stepper.of(fsdp2) if "steady" in trims.chosen() else None
    for (owner, name), wrapper in trims.patches(fsdp2, stepper.patches() if stepper else ()):
        # A trim stands in for torch's code, not for somebody else's.
        if others.is_untouched(without_ours(vars(owner).get(name))):
            wanted.append((owner, name, _while_on(wrapper)))
    for owner, name, make in wanted:
        point = _point(owner, name) or PatchPoint(owner, name, make)
        if point not in _points:
            _points.append(point)
        _places[id(owner), name] = point
        point.install(_points)
        stranger = point.bypassed()
        if stranger is not None:
            log("info", "%s was wrapped by %s before", point, others.describe(stranger))
    frames.pass_over()
    _waits.clear()
    _waits.update({point.owner: point.installed for point in _points if point.name == _WAIT})
    _judged.clear()
    _swapped.clear()
    counters.reset()
    _options["zero_copy"] = zero_copy
    _reducer = (
        Reducer(fsdp2, fsdp2.reduce, trims.sharded_dtensor(fsdp2))
        if fsdp2.reduce is not None
        else None
    )
    _stepper = stepper
    if stepper is not None:
        stepper.begin()
    _unsharder = Unsharder(fsdp2, zero_copy=zero_copy, on_adopt=_on_adopt)
    announce("on", "on: torch %s, zero_copy=%s", torch.__version__, zero_copy)


def remove() -> None:
    """Restore every live parameter group and torch's methods. Idempotent."""
    global _unsharder, _reducer, _stepper
    with _changing:
        unsharder, reducer, stepper = _unsharder, _reducer, _stepper
        groups = adopted_groups()
        try:
            if reducer is not None:
                reducer.stop()
        except Exception as error:
            warn_once("reduce-failed", f"fsdp_skip1 could not finish all-reduces: {error!r}")
        if stepper is not None:
            stepper.stop()
        if unsharder is not None:
            # While ours is still in place: it passes through from here on, and another thread
            # may be between an unshard of ours and its end.
            unsharder.stop(lambda group: group.unshard())
        _unsharder = _reducer = _stepper = None
        staying = [point for point in reversed(_points) if not point.remove()]
        for point in staying:
            log(
                "info",
                "%s was wrapped by %s since; ours stays below that and passes through",
                point,
                others.describe(point.current),
            )
        _points[:] = staying
        _tidy_places()
        for group in groups:
            _tidy_instance(group)
        if unsharder is not None:
            announce("off", "off")


def _point(owner: Any, name: str) -> PatchPoint | None:
    for point in _points:
        if point.owner is owner and point.name == name:
            return point
    return None


# -- the wrappers ------------------------------------------------------------------------------


def _unshard(point: PatchPoint) -> Wrapping:
    def unshard(wrapped: Any, group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        unsharder = _unsharder
        if unsharder is None:
            return _pass_through(point, wrapped, group, args, kwargs)
        state = group.__dict__.get(ATTRIBUTE)
        if state is not None and state.plan.left_to_torch is not None:
            return wrapped(*args, **kwargs)  # all that a really sharded group pays
        if not _ours_waits(group) and not _may_begin(unsharder, group):
            unsharder.hand_back(group)
            return wrapped(*args, **kwargs)
        return unsharder.unshard(wrapped, group, args, kwargs)

    return unshard


def _wait_for_unshard(point: PatchPoint) -> Wrapping:
    def wait_for_unshard(
        wrapped: Any, group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        unsharder = _unsharder
        if unsharder is None:
            return _pass_through(point, wrapped, group, args, kwargs)
        state = group.__dict__.get(ATTRIBUTE)
        if state is None:
            _look_again()  # not unsharded through ours
        elif state.plan.left_to_torch is not None:
            return wrapped(*args, **kwargs)
        elif not _ours_waits(group):
            state.proof = _method_of(group, _WAIT)
        return unsharder.wait_for_unshard(wrapped, group, args, kwargs)

    return wait_for_unshard


def _foreach_reduce(point: PatchPoint) -> Wrapping:
    def foreach_reduce(
        wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        reducer = _reducer
        if reducer is None:
            return _pass_through(point, wrapped, instance, args, kwargs)
        return reducer.foreach_reduce(wrapped, args, kwargs)

    return foreach_reduce


def _root_pre_forward(point: PatchPoint) -> Wrapping:
    """Let the compute stream wait for ``set_post_optim_event`` too.

    Stock only makes the all-gather streams wait. Shared parameters are read by whatever stream
    runs forward.
    """

    def root_pre_forward(
        wrapped: Any, state: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        unsharder, stepper = _unsharder, _stepper
        if unsharder is None:
            return _pass_through(point, wrapped, state, args, kwargs)
        # A pass begins with the root, or with a block that is called by itself.
        running = getattr(state._state_ctx, "iter_forward_root", state)
        begins = state._is_root is not False or running is None
        if begins and not torch.compiler.is_compiling():
            _look_again()
            _look_for_reload(unsharder)
            if stepper is not None:
                stepper.look_again()
        event = state._state_ctx.post_optim_event
        if stepper is not None and len(args) == 3 and roots.begin_forward(stepper, state):
            result = args[1:]
        else:
            result = wrapped(*args, **kwargs)
        if event is not None and state._state_ctx.post_optim_event is None:
            groups = (g for s in state._state_ctx.all_states for g in groups_of(s))
            if any(shard_mesh_size(unsharder.fsdp2, g.mesh_info) == 1 for g in groups):
                state._device_handle.current_stream().wait_event(event)
        if state._is_root and not torch.compiler.is_compiling():
            if stepper is not None:
                stepper.hooks.take(state)
            _tell_of(state)
        return result

    return root_pre_forward


# Roots whose first forward the log has told of.
_told: weakref.WeakSet[Any] = weakref.WeakSet()


def _tell_of(root: Any) -> None:
    """Log, once a root, what its groups add up to."""
    if root in _told:
        return
    _told.add(root)
    level = "info" if rank() == 0 else "debug"
    if heard(level):
        try:
            from fsdp_skip1.explanation import first_forward

            log(level, "%s", first_forward(root))
        except Exception as error:
            log("debug", "the totals could not be told: %r", error)


def _while_on(wrapper: Wrapping) -> Callable[[PatchPoint], Wrapping]:
    def make(point: PatchPoint) -> Wrapping:
        def call(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if _unsharder is None:
                return _pass_through(point, wrapped, instance, args, kwargs)
            return wrapper(wrapped, instance, args, kwargs)

        return call

    return make


# -- other patchers ----------------------------------------------------------------------------


def _on_adopt(group: Any, plan: GroupPlan) -> str | None:
    """Say so when a group is left to torch for a reason that nobody asked for."""
    if plan.unexpected:
        warn_once("unexpected-group", f"fsdp_skip1 leaves a group to torch: {plan.left_to_torch}.")
    _look_again()
    if not _swapped.isdisjoint(type(group).__mro__):
        return "somebody replaced the code of its methods"
    return None


def _ours_waits(group: Any) -> bool:
    """Whether the group's ``wait_for_unshard`` is ours, with nobody around it."""
    cls = type(group)
    return cls.__dict__.get(_WAIT) is _waits.get(cls, _waits) and _WAIT not in group.__dict__


def _may_begin(unsharder: Unsharder, group: Any) -> bool:
    """Whether an unshard of ours would be finished by ours, through somebody else's method.

    See [Note: other patchers].
    """
    if not _swapped.isdisjoint(type(group).__mro__):
        return False
    method = _method_of(group, _WAIT)
    if is_ours(method):  # put back by somebody who had kept it
        return True
    state = unsharder.adopt(group)
    if state.proof is method:
        return True
    _look_again()
    if group._all_gather_result is None:
        state.trials += 1
        if state.trials > 2:  # one may be for nothing: a prefetch that nobody waits for
            _report({f"{type(group).__name__}.{_WAIT}": method})
    return False


def _method_of(group: Any, name: str) -> Any:
    own = group.__dict__.get(name)
    return others.of_class(type(group), name) if own is None else own


def _look_again() -> None:
    """Find out what no longer leads to ours, or to torch's own code; told once for each."""
    for point in tuple(_points):
        if point.name in _ESSENTIAL and not point.is_intact():
            break
    else:
        return
    if _changing.acquire(blocking=False):  # else it may be us who are at it, in another thread
        try:
            if _unsharder is not None:
                _judge()
        finally:
            _changing.release()


def _judge() -> None:
    lost = {}
    for point in _points:
        if point.name not in _ESSENTIAL or point.is_intact():
            continue
        found = point.swapped()
        if found is not None:
            _set_aside(point)
        elif not point.holds():
            found = point.current
        if found is not None and _judged.get(point) is not found:
            if point in _judged:
                log("info", "%s is now %s", point, others.describe(found))
            else:
                lost[str(point)] = found
            _judged[point] = found
    if lost:
        _report(lost)


def _set_aside(point: PatchPoint) -> None:
    """Ours stands around a function whose code is somebody else's now: let that run."""
    global _reducer
    if isinstance(point.owner, type):
        _swapped.add(point.owner)
        _waits.pop(point.owner, None)
    elif _reducer is not None:
        reducer, _reducer = _reducer, None
        reducer.stop()


def _report(lost: dict[str, Any]) -> None:
    back = [name for name, found in lost.items() if others.is_untouched(found)]
    words = [f"{name} by {others.describe(f)}" for name, f in lost.items() if name not in back]
    parts = [f"replaced {', '.join(words)}"] if words else []
    parts += [f"put torch's own {', '.join(back)} back"] if back else []
    warn_once(
        f"replaced:{parts}",
        f"fsdp_skip1 was switched on, and then somebody {' and '.join(parts)}. What goes through "
        "there is left to that code."
        + (" To have it back, call fsdp_skip1.enable()." if back else ""),
    )


def _look_for_reload(unsharder: Unsharder) -> None:
    """Patch a second ``FSDPParamGroup``, made by a reload, from which new groups may be built."""
    fsdp2 = unsharder.fsdp2
    if vars(fsdp2.group_module).get("FSDPParamGroup") in fsdp2.group_classes:
        return
    if _changing.acquire(blocking=False):
        try:
            if _unsharder is unsharder:
                log("info", "%s was reloaded", fsdp2.group_module.__name__)
                counted = counters.as_dict()
                remove()
                install(zero_copy=_options["zero_copy"])
                for name, value in counted.items():
                    setattr(counters, name, value)
        finally:
            _changing.release()


def _pass_through(
    point: PatchPoint, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Ours is called while the plugin is off: get out of the way, see [Note: soft undo]."""
    if _changing.acquire(blocking=False):  # else somebody may be switching it on
        try:
            if _unsharder is None:
                if any(p.name == point.name and is_ours(p.current) for p in _places.values()):
                    _tidy_places()
                _tidy_instance(instance)
        finally:
            _changing.release()
    return wrapped(*args, **kwargs)


def _tidy_places() -> None:
    """While off: take ours away wherever it came back to its place with nobody around it."""
    for point in _places.values():
        if point.tidy() and point in _points:
            _points.remove(point)


def _tidy_instance(instance: Any) -> None:
    """Who patches single groups keeps bound methods, and puts them back on the group."""
    stored = getattr(instance, "__dict__", None)
    if isinstance(stored, dict):
        for name in [name for name, value in stored.items() if is_ours(value)]:
            stored[name] = without_ours(stored[name])
