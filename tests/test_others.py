"""What a function leads to, and whose it is: every way to wrap one, and objects set as traps.

In forked children, since importing any part of the package switches the plugin on.
"""

import functools
import inspect
import time
import types
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.fsdp
import wrapt
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

pytestmark = pytest.mark.forked

NAME = "unshard"
_original: Any = None
_originals: dict[str, Any] = {}


def target(self: Any, async_op: bool = False) -> None:
    """What has to be found."""


class Owner:
    """Stands for a class that is patched."""


# - Wrappers: each puts something around ``target`` through which it can be found.


def by_closure():
    original = target

    def wrapper(*args):
        return original(*args)

    return wrapper


def by_wraps():
    @functools.wraps(target)
    def wrapper(*args):
        return None

    return wrapper


def by_default():
    def wrapper(self, original=target):
        return original(self)

    return wrapper


def by_keyword_default():
    def wrapper(self, *, original=target):
        return original(self)

    return wrapper


def by_global():
    global _original
    _original = target

    def wrapper(*args):
        return _original(*args)

    return wrapper


def by_dictionary():
    _originals[NAME] = target

    def wrapper(*args):
        return _originals[NAME](*args)

    return wrapper


def by_enclosed_list():
    originals = [target]

    def wrapper(*args):
        return originals[0](*args)

    return wrapper


def by_enclosed_object():
    keeper = types.SimpleNamespace(original=target)

    def wrapper(*args):
        return keeper.original(*args)

    return wrapper


def by_class_attribute():
    Owner._original_unshard = target

    def wrapper(self, *args):
        return Owner._original_unshard(self, *args)

    return wrapper


def by_inner_function():
    global _original
    _original = target

    def wrapper(*args):
        def inner():
            return _original(*args)

        return inner()

    return wrapper


def by_lambda():
    original = target
    return lambda *args: original(*args)


def by_partial():
    return functools.partial(target, async_op=True)


def by_partialmethod():
    return functools.partialmethod(target, async_op=True)


def by_bound_method():
    return types.MethodType(by_closure(), object())


def by_staticmethod():
    return staticmethod(by_closure())


def by_object():
    class Wrapper:
        def __init__(self, function):
            self.function = function

        def __call__(self, *args):
            return self.function(*args)

    return Wrapper(target)


def by_object_of_a_class_that_calls_it():
    class Wrapper:
        def __call__(self, *args, original=target):
            return original(*args)

    return Wrapper()


def by_cache():
    return functools.lru_cache(target)


def by_wrapt():
    return wrapt.FunctionWrapper(target, lambda wrapped, *rest: wrapped())


def by_bound_wrapt():
    wrapper = wrapt.FunctionWrapper(target, lambda wrapped, *rest: wrapped())
    return wrapper.__get__(object(), object)


def by_wrapt_that_ignores_what_it_wraps():
    return wrapt.FunctionWrapper(len, lambda *_, original=target: original())


def by_mock():
    return mock.MagicMock(side_effect=target)


def by_torch_decorator():
    return torch.no_grad()(by_closure())


def by_five_at_once():
    wrapper = by_closure()
    for _ in range(5):
        wrapper = functools.partial(functools.wraps(wrapper)(lambda *args, w=wrapper: w(*args)))
    return wrapper


WRAPPERS = [value for name, value in list(globals().items()) if name.startswith("by_")]


def test_a_wrapper_leads_to_what_it_wraps() -> None:
    from fsdp_skip1 import others

    # All in one child: each takes microseconds.
    lost = []
    for wrap in WRAPPERS:
        wrapper = wrap()
        if not others.reaches(wrapper, target, Owner) or others.reaches(wrapper, print, Owner):
            lost.append(wrap.__name__)
        assert isinstance(others.describe(wrapper), str)
    assert len(WRAPPERS) > 20
    assert lost == []


def test_what_is_only_mentioned_is_not_reached() -> None:
    from fsdp_skip1 import others

    def names_it() -> str:
        return "target"  # a string leads nowhere

    def other_name() -> Any:
        return _another_global  # noqa: F821

    assert not others.reaches(names_it, target)
    assert not others.reaches(other_name, target)
    assert not others.reaches(None, target)
    assert not others.reaches(target, None)


# - Traps


def cycle():
    def first():
        return second()

    def second():
        return first()

    first.__wrapped__, second.__wrapped__ = second, first
    return first


def own_wrapped():
    def function():
        return function

    function.__wrapped__ = function
    return function


def endless_attributes():
    class Endless:
        def __getattr__(self, name):
            return Endless()

        def __call__(self):
            return None

    return Endless()


def raising_attributes():
    class Raising:
        def __getattribute__(self, name):
            raise RuntimeError(name)

        def __call__(self):
            return None

        def __eq__(self, other):
            raise RuntimeError("compared")

        def __bool__(self):
            raise RuntimeError("asked for its truth")

        __hash__ = None

    return Raising()


def lying_class():
    class Lying:
        @property
        def __class__(self):
            raise RuntimeError("no class")

        @property
        def __wrapped__(self):
            raise RuntimeError("no such thing")

        def __call__(self):
            return None

    return Lying()


def hostile_metaclass():
    class Meta(type):
        def __getattribute__(cls, name):
            raise RuntimeError(name)

        def __eq__(cls, other):
            raise RuntimeError("compared")

        def __instancecheck__(cls, instance):
            raise RuntimeError("asked for an instance")

        __hash__ = None

    class Hostile(metaclass=Meta):
        def __call__(self):
            return None

    return object.__new__(Hostile)


def self_reference():
    class Node:
        def __call__(self):
            return None

    node = Node()
    node.me = node.also = node
    return node


def wide_and_deep():
    """Functions that each lead to many more."""

    def make(depth):
        if not depth:
            return lambda: None
        inner = [make(depth - 1) for _ in range(6)]
        return lambda: inner

    return make(5)


def huge_containers():
    many, table = [len] * 10**6, dict.fromkeys(range(10**6), len)

    def function():
        return many, table

    return function


def long_chain():
    function = target
    for _ in range(10_000):
        function = functools.partial(lambda f: f, function)
    return function


def proxy_of_nothing():
    return wrapt.ObjectProxy.__new__(wrapt.ObjectProxy)


def empty_cell():
    def outer():
        def function():
            return later

        if False:
            later = None
        return function

    return outer()


def c_functions():
    return [len, print, object.__init__, [].append, str.join, torch.add, torch.Tensor.add_,
            torch.ops.aten.add, types.FunctionType, property(), int, torch]  # fmt: skip


def mocks():
    return mock.MagicMock(wraps=mock.call.a.b)


TRAPS = [
    cycle, own_wrapped, endless_attributes, raising_attributes, lying_class, hostile_metaclass,
    self_reference, wide_and_deep, huge_containers, long_chain, proxy_of_nothing, empty_cell,
    c_functions, mocks,
]  # fmt: skip


@pytest.mark.parametrize("trap", TRAPS, ids=lambda f: f.__name__)
def test_traps(trap: Any) -> None:
    from fsdp_skip1 import others, points

    value = trap()
    nothing = object()

    def enclosing():
        return value

    start = time.process_time()
    for one in (*(value if type(value) is list else [value]), enclosing):
        assert len(list(others.walk(one))) <= 128
        assert not others.reaches(one, nothing)
        assert others.leads_to_torch(one, NAME) is None
        assert isinstance(others.describe(one), str)
        assert others.is_untouched(one) in (True, False)
        assert not points.is_ours(one)
        assert points.without_ours(one) is one
    assert time.process_time() - start < 1


# - Whose it is


@pytest.fixture
def off():
    import fsdp_skip1

    fsdp_skip1.disable()


def test_torchs_own(off: None) -> None:
    from fsdp_skip1 import others

    for name in ("unshard", "wait_for_unshard", "post_backward", "pre_backward", "_to_sharded"):
        function = vars(FSDPParamGroup)[name]
        assert others.is_untouched(function)
        assert others.leads_to_torch(function, name) is inspect.unwrap(function)
        assert others.leads_to_torch(function, "something_else") is None
    assert others.is_untouched(vars(FSDPParamGroup)["is_unsharded"])
    assert others.is_untouched(collectives.foreach_reduce)
    assert others.is_untouched(torch.profiler.record_function)
    assert "FSDPParamGroup" in others.describe(vars(FSDPParamGroup)["reshard"])


def copy_of_names():
    @functools.wraps(FSDPParamGroup.unshard)
    def wrapper(self, async_op=False):
        return None

    del wrapper.__wrapped__
    return wrapper


def torchs_decorator():
    return torch.no_grad()(copy_of_names())


def swapped_code():
    own = inspect.unwrap(FSDPParamGroup.unshard)
    own.__code__ = copy_of_names().__code__.replace(co_freevars=())
    return FSDPParamGroup.unshard


def executed_in_torchs_namespace():
    source = "def unshard(self, async_op=False): pass"
    namespace = dict(FSDPParamGroup.unshard.__globals__)
    exec(source, namespace)
    return namespace["unshard"]


def torchs_under_another_name():
    return FSDPParamGroup.reshard


@pytest.mark.parametrize(
    "make",
    [copy_of_names, torchs_decorator, swapped_code, executed_in_torchs_namespace],
    ids=lambda f: f.__name__,
)
def test_not_torchs_own_whatever_it_says(off: None, make: Any) -> None:
    from fsdp_skip1 import others

    function = make()
    assert not others.is_untouched(function)
    assert others.leads_to_torch(function, NAME) is None
    words = others.describe(function)
    if make is executed_in_torchs_namespace:
        assert words.startswith("code of unshard (<string>:1) put into torch.distributed.fsdp")
    else:
        assert Path(__file__).name in words


def test_another_method_of_torchs_is_not_the_one(off: None) -> None:
    from fsdp_skip1 import others

    assert others.leads_to_torch(FSDPParamGroup.reshard, NAME) is None


def test_nothing_is_called(off: None) -> None:
    """Looking runs no code of what it looks at: neither functions nor properties."""
    from fsdp_skip1 import others

    class Property:
        @property
        def function(self):
            raise SystemExit("a property was read")

        def __call__(self):
            raise SystemExit("called")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        keeper = Property()
        list(others.walk(lambda: keeper.function))
        others.describe(keeper)
