"""What a function leads to, and whose it is: telling torch's own code from other patchers'.

Nothing here calls what it looks at. It meets whatever other libraries leave on a class: closures
that refer to themselves, proxies whose attributes never end, objects that raise at any look. So
attributes are read from where they are stored, past ``__getattr__``, every search is bounded,
and nothing raises.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import wrapt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

# How many callables one search looks at, and how many values of one container or namespace.
_CALLABLES = 128
_VALUES = 32

_ROOT = str(Path(torch.__file__).parent) + "/"

# Of what has no code of its own: the attribute that holds what is called.
_HOLDERS: tuple[tuple[type, str], ...] = (
    (types.MethodType, "__func__"),
    (staticmethod, "__func__"),
    (classmethod, "__func__"),
    (functools.partial, "func"),
    (functools.partialmethod, "func"),
    (property, "fget"),
)
_PROXY: type = wrapt.FunctionWrapper.__mro__[-2]


def reaches(start: Any, target: Any, owner: Any = None) -> bool:
    """Whether calling ``start`` may end up in ``target``, as far as can be seen.

    Args:
        start: any object.
        target: what to look for, by identity.
        owner: the class or module that ``start`` sits on, where the function that was there
            before may have been kept under another name.
    """
    return target is not None and any(found is target for found in walk(start, owner))


def leads_to_torch(start: Any, name: str, owner: Any = None) -> Any:
    """Torch's own function ``name`` that ``start`` is or wraps, or None."""
    for found in walk(start, owner):
        if is_torchs(found) and found.__code__.co_name == name:
            return found
    return None


def is_torchs(function: Any) -> bool:
    """Whether this is a Python function as torch's files define it.

    By its code, not by its name: ``functools.wraps`` copies names, and a function's
    ``__code__`` may have been replaced.
    """
    if type(function) is not types.FunctionType:
        return False
    module = function.__globals__.get("__name__")
    if type(module) is not str or not module.startswith("torch."):
        return False
    file = function.__code__.co_filename
    return file.startswith(_ROOT) or file == _stored(sys.modules.get(module)).get("__file__")


def is_untouched(value: Any) -> bool:
    """Whether a function, class or property is torch's own, and all that it wraps is, too."""
    if type(value) is property:
        value = value.fget
    if issubclass(type(value), type):
        module = _stored(value).get("__module__")
        return type(module) is str and module.startswith("torch.")
    for _ in range(_VALUES):
        if not is_torchs(value):
            return False
        value = _stored(value).get("__wrapped__")
        if value is None:
            return True
    return False


def walk(start: Any, owner: Any = None) -> Iterator[Any]:
    """``start``, and every callable that it could call, nearest first.

    Followed are ``__wrapped__``, bound methods, partials, wrapt's proxies, closures, default
    values, the attributes of callable objects, and what goes by a name that the code mentions
    among its globals, the attributes of ``owner`` and the attributes of enclosed objects.
    """
    todo: deque[Any] = deque([start])
    # By identity, since anything may be unhashable; kept alive, since identities are used again.
    seen: dict[int, Any] = {}
    while todo and len(seen) < _CALLABLES:
        found = todo.popleft()
        if id(found) in seen:
            continue
        seen[id(found)] = found
        yield found
        todo.extend(v for v in _within(found, owner) if id(v) not in seen and _is_callable(v))


def describe(value: Any) -> str:
    """Who a callable belongs to, for a message: where its code is, whatever its name says."""
    found = torchs = None
    for found in walk(value):
        # Past what has no code of its own, and past decorators of torch's around others' code.
        if _holder(type(found)) is None and not is_torchs(found):
            break
        torchs = found
    else:
        found = torchs
    if issubclass(type(found), _PROXY):
        wrapper = _safely(object.__getattribute__, found, "_self_wrapper")
        found = found if wrapper is None else wrapper
    if type(found) is types.FunctionType:
        code = found.__code__
        name = getattr(code, "co_qualname", code.co_name)  # Python 3.11+
        place = f"{Path(code.co_filename).name}:{code.co_firstlineno}"
        module = found.__globals__.get("__name__")
        if str(module).startswith("torch.") and not is_torchs(found):
            return f"code of {name} ({place}) put into {module}.{found.__qualname__}"
        return f"{module}.{name} ({place})"
    cls = found if issubclass(type(found), type) else type(found)
    name = ".".join(
        str(type.__getattribute__(cls, part)) for part in ("__module__", "__qualname__")
    )
    return name if cls is found else f"an object of class {name}"


def _within(value: Any, owner: Any) -> Iterator[Any]:
    """What calling ``value`` may call."""
    cls = type(value)
    holder = _holder(cls)
    if holder is not None:
        yield _safely(getattr, value, holder)
    elif issubclass(cls, _PROXY):
        # The proxy's own slots; any other attribute is that of what it wraps.
        for name in ("__wrapped__", "_self_parent", "_self_wrapper"):
            yield _safely(object.__getattribute__, value, name)
    elif cls is types.FunctionType:
        yield _stored(value).get("__wrapped__")
        yield from _of_function(value, owner)
    elif not issubclass(cls, (type, types.ModuleType)):
        stored = _stored(value)
        yield stored.get("__wrapped__")
        yield of_class(cls, "__call__")
        yield from _some(stored.values())


def _of_function(function: types.FunctionType, owner: Any) -> Iterator[Any]:
    enclosed = []
    for cell in (function.__closure__ or ())[:_VALUES]:
        try:
            enclosed.append(cell.cell_contents)
        except ValueError:  # a cell that is still empty
            continue
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for value in [*enclosed, *defaults[:_VALUES]]:
        yield value
        yield from _contents(value)
    if is_torchs(function):
        return  # torch's globals are no way to somebody else's wrapper
    spaces = [function.__globals__, _stored(owner), *map(_stored, enclosed[:8])]
    for name in _names(function.__code__):
        for space in spaces:
            value = dict.get(space, name) if isinstance(space, dict) else space.get(name)
            yield value
            yield from _contents(value)


def _names(code: types.CodeType) -> list[str]:
    """Names that the code, or a function defined in it, looks up."""
    names = list(code.co_names)
    for constant in code.co_consts:
        if type(constant) is types.CodeType:
            names += constant.co_names
    return list(dict.fromkeys(names))[: 4 * _VALUES]


def _contents(value: Any) -> Iterable[Any]:
    """What a plain container holds: originals are often kept in one."""
    cls = type(value)
    if cls is dict:
        return _some(value.values())
    if any(cls is known for known in (list, tuple, set, frozenset)):
        return _some(value)
    return ()


def _some(values: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    try:
        for value in values:
            found.append(value)
            if len(found) == _VALUES:
                break
    except RuntimeError:  # changed by another thread meanwhile
        pass
    return found


def _is_callable(value: Any) -> bool:
    cls = type(value)
    return of_class(cls, "__call__") is not None or _holder(cls) is not None


def _holder(cls: type) -> str | None:
    for base in type.__getattribute__(cls, "__mro__"):
        for known, attribute in _HOLDERS:
            if base is known:
                return attribute
    return None


def _stored(value: Any) -> Mapping[str, Any]:
    """An object's attributes where they are stored, with none of its own code run."""
    found = _safely(object.__getattribute__, value, "__dict__")
    return found if type(found) is dict or type(found) is types.MappingProxyType else {}


def of_class(cls: type, name: str) -> Any:
    for base in type.__getattribute__(cls, "__mro__"):
        found = type.__getattribute__(base, "__dict__").get(name)
        if found is not None:
            return found
    return None


def _safely(look: Callable[..., Any], *args: Any) -> Any:
    try:
        return look(*args)
    except Exception:
        return None
