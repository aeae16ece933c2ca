"""Where the plugin is installed and removed.

Patched are two methods of ``FSDPParamGroup``, the function ``foreach_reduce`` in each module
that holds it, and one method of ``FSDPState``. Each replacement is a wrapt wrapper that asks at
call time whether the plugin is on; off, it only passes through.
"""

from __future__ import annotations

import functools
import sys
import types
from typing import TYPE_CHECKING, Any

import torch
import wrapt

from fsdp_skip1 import trims
from fsdp_skip1.counters import counters
from fsdp_skip1.notices import announce, heard, log, rank, warn_once
from fsdp_skip1.plan import shard_mesh_size
from fsdp_skip1.reduce import Reducer
from fsdp_skip1.releases import NotUnderstood, read
from fsdp_skip1.unshard import Unsharder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fsdp_skip1.plan import GroupPlan
    from fsdp_skip1.releases import Fsdp2

_unsharder: Unsharder | None = None
_reducer: Reducer | None = None
_points: list[PatchPoint] = []
_options: dict[str, bool] = {}


class PatchPoint:
    """One attribute of one class or module that is replaced while the plugin is on."""

    def __init__(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        self.owner = owner
        self.name = name
        self._wrapper = wrapper
        self.original: Any = None
        self.installed: Any = None
        self._seen: Any = None

    @property
    def current(self) -> Any:
        return vars(self.owner).get(self.name)

    def install(self) -> None:
        if self.installed is not None and reaches(self.current, self.installed):
            return
        self.original = self.current
        self.installed = wrapt.FunctionWrapper(self.original, self._wrapper)
        setattr(self.owner, self.name, self.installed)
        self._seen = self.installed

    def remove(self) -> bool:
        """Put the original back; False if somebody has wrapped ours, which then stays."""
        if self.current is self.installed:
            setattr(self.owner, self.name, self.original)
            self.installed = None
            return True
        if not reaches(self.current, self.installed):
            self.installed = None  # somebody put another function there, ours is gone
            return True
        return False

    def holds(self) -> bool:
        """Whether a call still arrives at our wrapper, perhaps through somebody else's."""
        current = self.current
        if current is self._seen:
            return True
        if reaches(current, self.installed):
            self._seen = current
            return True
        return False


def install(*, zero_copy: bool) -> bool:
    """Patch the FSDP2 that is loaded. Returns whether it took; never raises."""
    global _unsharder, _reducer
    if _unsharder is not None:
        if _options.get("zero_copy") == zero_copy and all(p.holds() for p in _points):
            return True
        remove()
    try:
        _install(look(), zero_copy)
    except NotUnderstood as error:
        warn_once(
            "not-understood",
            f"fsdp_skip1 leaves torch {torch.__version__} as it is: found {error.found}, "
            f"expected {error.expected}. Training goes on with torch's own code.",
        )
        return False
    except Exception as error:
        remove()
        warn_once(
            "install-failed",
            f"fsdp_skip1 could not be switched on ({type(error).__name__}: {error}). "
            "Training goes on with torch's own code.",
        )
        return False
    return True


def look() -> Fsdp2:
    """The FSDP2 that is loaded, if it can be patched. Changes nothing.

    Raises:
        NotUnderstood: if it cannot.
    """
    fsdp2 = read()
    stranger = _replaced_outright(fsdp2)
    if stranger is not None:
        raise NotUnderstood(*stranger)
    return fsdp2


def running() -> Fsdp2 | None:
    """The FSDP2 that is patched at this moment, or None. For reports."""
    unsharder = _unsharder
    return None if unsharder is None else unsharder.fsdp2


def points() -> tuple[PatchPoint, ...]:
    """What is replaced at this moment. For reports."""
    return tuple(_points)


def _install(fsdp2: Fsdp2, zero_copy: bool) -> None:
    global _unsharder, _reducer
    wanted: list[tuple[Any, str, Callable[..., Any]]] = []
    for cls in fsdp2.group_classes:
        wanted += [(cls, "unshard", _unshard), (cls, "wait_for_unshard", _wait_for_unshard)]
    if fsdp2.reduce is not None:
        wanted += [(module, "foreach_reduce", _foreach_reduce) for module in fsdp2.reduce_modules]
    else:
        log("info", "reduction is left to torch: %s", fsdp2.reduce_reason)
    if fsdp2.state_class is not None and "_root_pre_forward" in vars(fsdp2.state_class):
        wanted.append((fsdp2.state_class, "_root_pre_forward", _root_pre_forward))
    wanted += [(owner, name, _while_on(wrapper)) for owner, name, wrapper in trims.patches(fsdp2)]
    for owner, name, wrapper in wanted:
        point = _point(owner, name) or PatchPoint(owner, name, wrapper)
        point.install()
        if point not in _points:
            _points.append(point)
    counters.reset()
    _options["zero_copy"] = zero_copy
    _reducer = Reducer(fsdp2, fsdp2.reduce) if fsdp2.reduce is not None else None
    _unsharder = Unsharder(fsdp2, zero_copy=zero_copy, on_adopt=_on_adopt)
    announce("on", "on: torch %s, zero_copy=%s", torch.__version__, zero_copy)


def remove() -> None:
    """Restore torch's methods and every live parameter group. Idempotent."""
    global _unsharder, _reducer
    unsharder, _unsharder = _unsharder, None
    reducer, _reducer = _reducer, None
    if reducer is not None:
        reducer.stop()
    staying = []
    for point in reversed(_points):
        if not point.remove():
            staying.append(point)
            log(
                "info",
                "%s was wrapped by somebody else; ours stays below it and passes through",
                f"{_name(point.owner)}.{point.name}",
            )
    _points[:] = staying
    if unsharder is not None:
        # After the methods are torch's again: a pending unshard becomes a real one.
        unsharder.stop(lambda group: group.unshard())
        announce("off", "off")


def _point(owner: Any, name: str) -> PatchPoint | None:
    for point in _points:
        if point.owner is owner and point.name == name:
            return point
    return None


# -- the wrappers ------------------------------------------------------------------------------


def _unshard(wrapped: Any, group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    unsharder = _unsharder
    if unsharder is None:
        return wrapped(*args, **kwargs)
    return unsharder.unshard(wrapped, group, args, kwargs)


def _wait_for_unshard(
    wrapped: Any, group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    unsharder = _unsharder
    if unsharder is None:
        return wrapped(*args, **kwargs)
    return unsharder.wait_for_unshard(wrapped, group, args, kwargs)


def _foreach_reduce(
    wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    reducer = _reducer
    if reducer is None:
        return wrapped(*args, **kwargs)
    return reducer.foreach_reduce(wrapped, args, kwargs)


def _root_pre_forward(
    wrapped: Any, state: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Let the compute stream wait for ``set_post_optim_event`` too.

    Stock only makes the all-gather streams wait. Shared parameters are read by whatever stream
    runs forward.
    """
    unsharder = _unsharder
    event = None if unsharder is None else state._state_ctx.post_optim_event
    result = wrapped(*args, **kwargs)
    if event is not None and unsharder is not None and state._state_ctx.post_optim_event is None:
        groups = (g for s in state._state_ctx.all_states for g in _groups_of(s))
        if any(shard_mesh_size(unsharder.fsdp2, g.mesh_info) == 1 for g in groups):
            state._device_handle.current_stream().wait_event(event)
    return result


def _groups_of(state: Any) -> list[Any]:
    many = getattr(state, "_fsdp_param_groups", None)  # 2.12+
    if many is not None:
        return list(many)
    one = state._fsdp_param_group
    return [] if one is None else [one]


def _while_on(wrapper: Callable[..., Any]) -> Callable[..., Any]:
    def call(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _unsharder is None:
            return wrapped(*args, **kwargs)
        return wrapper(wrapped, instance, args, kwargs)

    return call


# -- other patchers ----------------------------------------------------------------------------


def _on_adopt(group: Any, plan: GroupPlan) -> str | None:
    """Look again when a group is first used: somebody may have patched after us."""
    if plan.unexpected:
        warn_once("unexpected-group", f"fsdp_skip1 leaves a group to torch: {plan.left_to_torch}.")
    for point in _points:
        if point.name in ("unshard", "wait_for_unshard") and not point.holds():
            if isinstance(group, point.owner):
                who = describe(point.current)
                warn_once(
                    f"replaced-{point.name}",
                    f"{_name(point.owner)}.{point.name} was replaced by {who} after fsdp_skip1 "
                    "was switched on; its groups are left to that. Import fsdp_skip1 last, or "
                    "call fsdp_skip1.enable() again, to have it back.",
                )
                return f"{point.name} was replaced by {who}"
    return None


def _replaced_outright(fsdp2: Fsdp2) -> tuple[str, str] | None:
    """A method that is somebody else's and does not lead back to torch's own."""
    for cls in fsdp2.group_classes:
        for name in ("unshard", "wait_for_unshard"):
            function = vars(cls).get(name)
            if function is None or any(_is_torchs(f) for f in walk(function)):
                continue
            return (
                f"{cls.__name__}.{name} replaced by {describe(function)}",
                "torch's own method, or a wrapper around it",
            )
    return None


def _is_torchs(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    if code is None:
        return False
    module = getattr(function, "__module__", None) or ""
    if not module.startswith("torch."):
        return False
    # By the code's own file, not by the function's name: somebody may have swapped ``__code__``.
    file: str = code.co_filename
    owner = sys.modules.get(module)
    root = (getattr(torch, "__file__", None) or "").rsplit("__init__", 1)[0]
    return file == getattr(owner, "__file__", None) or bool(root and file.startswith(root))


def reaches(start: Any, target: Any) -> bool:
    """Whether calling ``start`` may end up in ``target``, as far as can be seen."""
    return target is not None and any(f is target for f in walk(start))


def walk(start: Any, limit: int = 64) -> Iterator[Any]:
    """``start`` and every function it wraps: by ``__wrapped__``, closure, partial or method."""
    todo: list[Any] = [start]
    seen: set[int] = set()
    while todo and len(seen) < limit:
        function = todo.pop()
        if function is None or id(function) in seen:
            continue
        seen.add(id(function))
        yield function
        todo.append(getattr(function, "__wrapped__", None))
        todo.append(getattr(function, "__func__", None))
        if isinstance(function, functools.partial):
            todo.append(function.func)
        if isinstance(function, types.FunctionType):
            for cell in function.__closure__ or ():
                try:
                    content = cell.cell_contents
                except ValueError:  # a cell that is still empty
                    continue
                if callable(content):
                    todo.append(content)


def describe(function: Any) -> str:
    """Who a function belongs to, for a message."""
    module = getattr(function, "__module__", None) or "?"
    name = getattr(function, "__qualname__", None) or type(function).__name__
    return f"{module}.{name}"


def _name(owner: Any) -> str:
    return str(getattr(owner, "__name__", owner))
