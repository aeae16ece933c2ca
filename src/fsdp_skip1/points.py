"""One attribute that is replaced while the plugin is on, and how it gets its own value back.

[Note: soft undo]
Others may have taken hold of a wrapper of ours while it was in place: they call it from a wrapper
of their own, or keep it to put it back later. Then it cannot be taken away, only turned into a
pass-through, and it may come back to the class long after ``disable()``. So every wrapper of ours
is known by its type: none is ever wrapped again, and one that is found in a place of its own while
the plugin is off makes way for what it wraps.
"""

from __future__ import annotations

import copy
import pkgutil
from typing import TYPE_CHECKING, Any

import wrapt

from fsdp_skip1 import others

if TYPE_CHECKING:
    from collections.abc import Callable

    # What wrapt calls: with what is wrapped, the instance, and the arguments.
    Wrapping = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]

_MARK = "fsdp_skip1_wrapper"


class BoundWrapper(wrapt.BoundFunctionWrapper):
    """What an attribute access on a class or an instance gives."""

    fsdp_skip1_wrapper = True

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._self_instance is not None:
            return getattr, (self._self_instance, self.__name__)
        return _by_name(self)

    def __reduce__(self) -> Any:
        return self.__reduce_ex__(2)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        # As a plain function; as a plain bound method where there is an instance.
        if self._self_instance is None:
            return self
        return copy.deepcopy(self.__wrapped__, memo)


class Wrapper(wrapt.FunctionWrapper):
    """A function of torch's with one of ours around it.

    wrapt passes signature, name, docstring and source through; pickling, which it refuses, is
    here what it is for a function: by name.
    """

    fsdp_skip1_wrapper = True
    __bound_function_wrapper__ = BoundWrapper

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _by_name(self)

    def __reduce__(self) -> Any:
        return _by_name(self)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self


def _by_name(function: Any) -> Any:
    # Through the standard library, so that a process without the plugin can load it.
    return pkgutil.resolve_name, (f"{function.__module__}:{function.__qualname__}",)


def is_ours(value: Any) -> bool:
    """Whether this is a wrapper of ours, perhaps of an earlier copy of this package."""
    return others.of_class(type(value), _MARK) is True


def without_ours(value: Any) -> Any:
    """What is left of ``value`` when every wrapper of ours around it is taken off."""
    while is_ours(value):
        parent = value._self_parent
        bound = parent is not None and value._self_instance is not None
        value = value.__wrapped__ if bound or parent is None else parent.__wrapped__
    return value


class PatchPoint:
    """One attribute of one class or module that is replaced while the plugin is on.

    Attributes:
        owner: the class or module.
        name: the attribute.
        original: what was there before.
        installed: our wrapper around it.
    """

    __slots__ = ("_code", "_inherited", "_make", "_seen", "installed", "name", "original", "owner")

    def __init__(self, owner: Any, name: str, make: Callable[[PatchPoint], Wrapping]) -> None:
        self.owner = owner
        self.name = name
        self._make = make
        self._inherited = False
        self._code: tuple[Any, Any] = (None, None)
        self._seen: Any = None  # the last thing found here that leads to ours
        self.original: Any = None
        self.installed: Any = None

    def __str__(self) -> str:
        return f"{str(self.owner.__name__).rpartition('.')[2]}.{self.name}"

    @property
    def current(self) -> Any:
        """What is there now, as it is stored."""
        if isinstance(self.owner, type):
            return others.of_class(self.owner, self.name)
        return vars(self.owner).get(self.name)

    def install(self, twins: list[PatchPoint]) -> None:
        """Put our wrapper here, unless it is here already.

        Args:
            twins: points installed before; one name of one function gets one wrapper, so that
                modules that shared the function go on to share it.
        """
        if self.installed is not None and others.reaches(self.current, self.installed, self.owner):
            return
        self._inherited = self.name not in vars(self.owner)
        self.original = without_ours(self.current)
        function = others.leads_to_torch(self.original, self.name, self.owner)
        self._code = function, getattr(function, "__code__", None)
        for twin in twins:
            same = twin.name == self.name and twin.original is self.original
            if same and twin is not self:
                self.installed = twin.installed
                break
        else:
            self.installed = Wrapper(self.original, self._make(self))
        setattr(self.owner, self.name, self.installed)
        if self.current is not self.installed:
            raise RuntimeError(f"{self} could not be replaced")

    def remove(self) -> bool:
        """Put the original back; False if somebody has wrapped ours, which then stays."""
        if self.tidy():
            return True
        return not others.reaches(self.current, self.installed, self.owner)

    def tidy(self) -> bool:
        """If what is here is ours, put what it wraps here instead."""
        current = self.current
        if not is_ours(current):
            return False
        if self._inherited:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, without_ours(current))
        return True

    def holds(self) -> bool:
        """Whether a call still arrives at our wrapper, perhaps through somebody else's."""
        current = self.current
        if current is self.installed or current is self._seen:
            return True
        if others.reaches(current, self.installed, self.owner):
            self._seen = current
            return True
        return False

    def is_intact(self) -> bool:
        """Whether ours is in its place with nobody around it, around what it was put around."""
        function, code = self._code
        return self.current is self.installed and (function is None or function.__code__ is code)

    def swapped(self) -> Any:
        """Torch's function, if somebody has replaced its code since; else None."""
        function, code = self._code
        return None if function is None or function.__code__ is code else function

    def bypassed(self) -> Any:
        """Somebody else's wrapper that ours went around, or None."""
        return None if others.is_untouched(self.original) else self.original
