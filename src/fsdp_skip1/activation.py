"""Whether the plugin is on, why, and when torch gets patched.

What is *wanted* (a `Decision`) changes at any moment and from any thread. What is *installed* is
made to follow by `_settle`, the only function here that touches torch, wrapt or `sys.meta_path`.
It runs when the decision changes, when torch is looked up for the first time, and when torch's
FSDP2 has been imported.

Two rules keep imports safe:

* Whoever is inside an import (the package's own start, the observer, the post-import hook) never
  waits for another thread. If one is at work already, it is told to look again, and does so.
* Nothing raises. What goes wrong becomes one warning, and torch stays as it is.

wrapt costs 50 ms to import, which a process that never imports torch should not pay. So its hook is
registered when torch is first looked up, and until then a small observer sits on `sys.meta_path`.
"""

from __future__ import annotations

import os
import sys
from _thread import RLock, get_ident

import _fsdp_skip1_autoload as variable
from fsdp_skip1 import notices

# Type checkers take this name for typing.TYPE_CHECKING, and typing is dear to import.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType, TracebackType
    from typing import ParamSpec, TypeVar

    P = ParamSpec("P")
    R = TypeVar("R")

TORCH = "torch"
PARENT = "torch.distributed.fsdp"
FSDP2 = "torch.distributed.fsdp._fully_shard"

# Left on torch's FSDP2 package by whoever patched it, so that a second copy of this module
# (somebody emptied sys.modules and imported again) can send the first one home.
_MARK = "__fsdp_skip1_retire__"

# How long a caller of enable() or disable() waits for a thread that is at work. It only runs out
# when that thread waits, in turn, for an import that the caller is in the middle of.
_PATIENCE_S = 20.0


class Decision:
    """Whether the plugin should be on, and who said so. Immutable.

    Attributes:
        on: Whether it should be on.
        zero_copy: Whether unsharded parameters may share the sharded parameters' memory.
        cause: "import", "call" or "variable" (FSDP_SKIP1).
    """

    __slots__ = ("cause", "on", "zero_copy")

    on: bool
    zero_copy: bool
    cause: str

    def __init__(self, on: bool, zero_copy: bool, cause: str) -> None:
        object.__setattr__(self, "on", on)
        object.__setattr__(self, "zero_copy", zero_copy)
        object.__setattr__(self, "cause", cause)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Decision cannot be changed (tried to set {name!r})")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a Decision cannot be changed (tried to delete {name!r})")

    def __repr__(self) -> str:
        return f"Decision(on={self.on}, zero_copy={self.zero_copy}, cause={self.cause!r})"


# What is wanted. Guarded by _state where it is read and then replaced; a lone read needs no lock.
_wanted = Decision(False, True, "import")
_started = False
_state = RLock()

# What is installed. Only the thread that holds _work writes these.
_work = RLock()
_worker: int | None = (
    None  # the thread at work, to tell a call from within from one of another thread
)
_stale = False  # what is wanted may have changed since the last look; anybody may set it
_observer: _Observer | None = None
_hooked = False  # a post-import hook is registered and has not fired
_parent_hooked = False
_registering: int | None = None  # the thread that is registering a hook right now
_torch_sought = False  # torch was looked up: it is loaded, or about to be
_ran: ModuleType | None = None  # the FSDP2 package whose code has run to its end
_settled_on: ModuleType | None = None  # the FSDP2 package that patch.install was last called for
_refused = False  # patch.install said no, or failed
_patch: ModuleType | None = None


def enable(*, zero_copy: bool = True) -> bool:
    """Turn the plugin on, for the whole process.

    Allowed at any moment: before torch is imported, with models wrapped already, between forward
    and backward. Calling it again changes nothing but `zero_copy`.

    Args:
        zero_copy: Let unsharded parameters share the memory of the sharded ones. False keeps a
            private copy of each, for scripts that write to unsharded parameters and rely on losing
            the writes.

    Returns:
        True if the plugin is on, or will be once torch's FSDP2 is imported. False, after one
        warning, if FSDP_SKIP1=0 forbids it (the variable is read at each call) or if the plugin
        does not understand this torch. Never raises.
    """
    return _enable(zero_copy)


def disable() -> None:
    """Turn the plugin off, for the whole process, and go on with torch's own code.

    Allowed at any moment, also with FSDP_SKIP1=1 set and also between forward and backward.
    Calling it again changes nothing. Returns None and never raises.
    """
    _want(Decision(False, _wanted.zero_copy, "call"))


def is_enabled() -> bool:
    """Whether the plugin is on.

    Returns:
        True if it is at work, or will be once torch's FSDP2 is imported. False if it is off, or if
        it does not understand this torch. Never raises.
    """
    if _wanted.on:
        package = sys.modules.get(FSDP2)
        if _stale or (package is not None and package is not _settled_on):
            # FSDP2 came in unseen (somebody took the observer or wrapt's finder away): catch up.
            _settle(wait=False)
    return _wanted.on and not _refused


def enabled(*, zero_copy: bool = True) -> _Switch:
    """Context manager and decorator: the plugin on inside, as it was before outside.

    `with enabled() as on` gives what `enable()` returns. What it switches is the whole process, not
    only the calling thread.

    Args:
        zero_copy: As for `enable`.

    Returns:
        A context manager that can be nested and used again. Never raises of its own.
    """
    return _Switch(True, zero_copy)


def disabled() -> _Switch:
    """Context manager and decorator: the plugin off inside, as it was before outside.

    What it switches is the whole process, not only the calling thread.

    Returns:
        A context manager that can be nested and used again. Never raises of its own.
    """
    return _Switch(False, True)


def decision() -> Decision:
    """What is wanted at this moment, and why. For reports."""
    return _wanted


def start() -> None:
    """Act on the package having been imported. Never raises, and works once a process."""
    global _started
    try:
        with _state:
            if _started:
                return
            _started = True
        said = _read_variable()
        if said is None:
            _want(Decision(True, True, "import"), wait=False)
        else:
            _want(Decision(said, True, "variable"), wait=False)
    except Exception as error:
        notices.warn_once("start", f"fsdp_skip1 could not start, torch runs unchanged: {error!r}")


class _Switch:
    """What `enabled()` and `disabled()` return."""

    __slots__ = ("_before", "_on", "_zero_copy")

    def __init__(self, on: bool, zero_copy: bool) -> None:
        self._on = on
        self._zero_copy = zero_copy
        self._before: list[Decision] = []

    def __enter__(self) -> bool:
        self._before.append(_wanted)
        if self._on:
            return _enable(self._zero_copy)
        disable()
        return False

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _want(self._before.pop())

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        from functools import wraps

        @wraps(function)
        def switched(*args: P.args, **kwargs: P.kwargs) -> R:
            # A switch of its own for each call, so that threads do not mix up what was before.
            with _Switch(self._on, self._zero_copy):
                return function(*args, **kwargs)

        return switched


class _Observer:
    """Notices when torch is looked up. Finds and loads nothing itself."""

    __slots__ = ("done", "every_name")

    fsdp_skip1_observer = True

    def __init__(self, every_name: bool) -> None:
        self.done = False
        # After FSDP2 was met half imported, any look-up is the occasion to see whether it is whole.
        self.every_name = every_name

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """Nothing, ever. What `sys.meta_path` calls for each look-up of a module."""
        try:
            self.look(name)
        except Exception as error:
            _trouble("watch imports", error)
        return None

    def look(self, name: str) -> None:
        """Have things settled if this is the look-up that was waited for."""
        global _torch_sought
        if self.done or _superseded():
            return
        if self.every_name:
            package = sys.modules.get(FSDP2)
            if package is not None and not _whole(package):
                return
        elif name != TORCH and not name.startswith("torch."):
            return
        _torch_sought = True
        _settle(wait=False)


def _read_variable() -> bool | None:
    value = os.environ.get(variable.VARIABLE)
    message = variable.complaint(value)
    if message:
        notices.warn_once("variable", message)
    return variable.reading(value)


def _enable(zero_copy: bool) -> bool:
    if _read_variable() is False:
        notices.warn_once(
            "forbidden", f"fsdp_skip1 stays off: {variable.VARIABLE}=0 is set in the environment"
        )
        _want(Decision(False, zero_copy, "variable"))
        return False
    _want(Decision(True, bool(zero_copy), "call"))
    return not _refused


def _want(new: Decision, *, wait: bool = True) -> None:
    global _wanted
    with _state:
        _wanted = new
    _settle(wait=wait)


def _settle(*, wait: bool) -> None:
    """Make what is installed follow what is wanted. Never raises an Exception.

    Args:
        wait: Wait for another thread that is at it. Must be False inside an import: that thread may
            be waiting for this import's lock.
    """
    global _stale, _worker
    _stale = True
    # At least once, so that a caller who waits returns to a finished state, whoever finished it.
    while True:
        work = _work  # a fork in between replaces it, in the child
        if not (work.acquire(timeout=_PATIENCE_S) if wait else work.acquire(blocking=False)):
            return
        try:
            if _worker is not None:
                return  # called from within, for example by a warnings hook: the outer call goes on
            _worker = get_ident()
            try:
                while _stale:
                    _stale = False
                    _settle_once(_wanted)
            except BaseException:
                _stale = True
                raise
            finally:
                _worker = None
        finally:
            work.release()
        # Somebody may have come before we let go, found us at work and left it to us.
        if not _stale:
            return


def _settle_once(wanted: Decision) -> None:
    global _refused
    if not wanted.on:
        _watch(None)
        _uninstall()
        _refused = False
        return
    try:
        _settle_on(wanted)
    except Exception as error:
        _refused = True
        _trouble("switch itself on", error)


def _settle_on(wanted: Decision) -> None:
    global _refused
    if sys.modules.get(FSDP2) is None:
        _refused = False
        if not (_torch_sought or sys.modules.get(TORCH) is not None):
            _watch_for(every_name=False)
            return
        _watch(None)
        _hook()
    package = sys.modules.get(FSDP2)
    if package is None:
        return
    if not _whole(package):
        # Another thread is importing it: wait for that, as an import statement would. If it is this
        # thread, the statement returns at once.
        __import__(FSDP2)
        if not _whole(package):
            _watch_for(every_name=True)
            return
        package = sys.modules.get(FSDP2, package)
    _watch(None)
    _install(package, wanted)


def _watch_for(*, every_name: bool) -> None:
    """See to it that an observer of this kind is in place."""
    ours = _observer
    if ours is None or ours.every_name is not every_name or not _in_place(ours):
        _watch(_Observer(every_name))


def _in_place(observer: _Observer) -> bool:
    return any(finder is observer for finder in sys.meta_path)


def _watch(observer: _Observer | None) -> None:
    """Put `observer` on sys.meta_path in place of ours, if there is one."""
    global _observer
    if _observer is not None:
        _observer.done = True
    _observer = observer
    if any(getattr(finder, "fsdp_skip1_observer", False) for finder in sys.meta_path):
        # A new list: an import that is walking along the old one would miss a finder if an entry
        # before its place went away.
        sys.meta_path = [
            finder for finder in sys.meta_path if not getattr(finder, "fsdp_skip1_observer", False)
        ]
    if observer is not None:
        sys.meta_path.insert(0, observer)


def _hook() -> None:
    """Have wrapt call us when FSDP2, and the package around it, have been imported."""
    global _hooked, _parent_hooked, _registering
    from wrapt import register_post_import_hook

    # wrapt calls a hook on the spot if the module is in sys.modules, finished or not. Such a call
    # says nothing, and is told by _registering.
    _registering = get_ident()
    try:
        if not _hooked:
            _hooked = True
            register_post_import_hook(_fsdp2_imported, FSDP2)
        if not _parent_hooked:
            _parent_hooked = True
            register_post_import_hook(_parent_imported, PARENT)
    finally:
        _registering = None


def _fsdp2_imported(package: ModuleType) -> None:
    # An exception here would make the import of FSDP2 fail.
    global _hooked, _ran
    try:
        _hooked = False
        if _registering == get_ident() or _superseded():
            return
        _ran = package
        if _wanted.on:
            _settle(wait=False)
    except Exception as error:
        _trouble("switch itself on", error)


def _parent_imported(package: ModuleType) -> None:
    global _parent_hooked, _refused
    try:
        _parent_hooked = False
        if _superseded() or not _wanted.on or sys.modules.get(FSDP2) is not None:
            return
        if getattr(getattr(package, "__spec__", None), "_initializing", False) and (
            _registering == get_ident()
        ):
            return  # half imported: FSDP2 may be yet to come
        from importlib.util import find_spec

        if find_spec(FSDP2) is None:
            _refused = True
            notices.warn_once(
                "no-fsdp2",
                f"fsdp_skip1 does nothing: this torch has no {FSDP2}, which is where FSDP2 lives "
                "from torch 2.6 on",
            )
    except Exception as error:
        _trouble("look for FSDP2", error)


def _whole(package: ModuleType) -> bool:
    """Whether the FSDP2 package has everything in it that it will have."""
    if package is _ran:
        return True
    if not getattr(getattr(package, "__spec__", None), "_initializing", False):
        return True
    # The name comes in with the last of the modules that there is anything to patch in.
    return "fully_shard" in vars(package)


def _install(package: ModuleType, wanted: Decision) -> None:
    global _patch, _refused, _settled_on
    _settled_on = package
    before = vars(package).get(_MARK)
    if before is not None and before is not _retire:
        before()
    if _patch is None:
        from importlib import import_module

        _patch = import_module("fsdp_skip1.patch")
    _refused = not _patch.install(zero_copy=wanted.zero_copy)
    if not _refused:
        vars(package)[_MARK] = _retire


def _uninstall() -> None:
    global _settled_on
    package, _settled_on = _settled_on, None
    if _patch is None:
        return
    try:
        _patch.remove()
        if package is not None and vars(package).get(_MARK) is _retire:
            del vars(package)[_MARK]
    except Exception as error:
        _trouble("switch itself off", error)


def _retire() -> None:
    """Called by a later copy of this module that takes over."""
    _want(Decision(False, True, "import"), wait=False)


def _superseded() -> bool:
    """Whether the package was imported anew since, so that this copy has no say any more."""
    current = sys.modules.get(__name__)
    return current is not None and vars(current) is not globals()


def _trouble(what: str, error: Exception) -> None:
    notices.warn_once(
        f"trouble:{what}", f"fsdp_skip1 could not {what}, torch runs unchanged: {error!r}"
    )


def _after_fork() -> None:
    """In the child: locks that other threads held are held by nobody now."""
    global _registering, _stale, _state, _work, _worker
    _state = RLock()
    _work = RLock()
    me = get_ident()
    if _registering != me:
        _registering = None
    if _worker is not None and _worker != me:
        # That thread is gone, half-way. Left to the next occasion: a fork handler is no place to
        # import in.
        _worker = None
        _stale = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
