"""Hook overhead that a shard mesh of size 1 does not need.

On small layers FSDP2's bookkeeping in Python costs more than the layer. Each trim here takes
one such cost away, for groups of shard size 1 only, and falls back to torch's own code wherever
the two are not plainly equal. ``FSDP_SKIP1_TRIMS`` switches them: ``none``, or the names of
those to keep, separated by commas.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
import os
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fsdp_skip1.frames import frame_callback, nobody_traces
from fsdp_skip1.others import is_untouched
from fsdp_skip1.releases import functorch_active, has_attributes
from fsdp_skip1.unshard import ATTRIBUTE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from fsdp_skip1.points import Wrapping
    from fsdp_skip1.releases import Fsdp2
    from fsdp_skip1.unshard import GroupState

    # What is replaced: owner and attribute, and the wrapt wrapper.
    Patch = tuple[Any, str, Wrapping]

VARIABLE = "FSDP_SKIP1_TRIMS"

REASONS = {
    "ranges": "a profiler range records nothing while no profiler runs, yet costs two operators",
    "post_backward_function": "from torch 2.13 on its apply() inspects a signature at every call",
    "post_backward_view": "with one input, a view with a hook does what a Python Function does",
    "registration": "parameters are put on their modules through four calls each",
    "dtensor": "constructing a DTensor passes two decorators around an __init__ that does nothing",
    "dynamo_disable": "torch.compile's off-switch is wrapped anew at every backward hook",
    "steady": "a settled group decides nothing, yet torch's methods take hundreds of calls a step",
    "pre_backward_hook": "the output is searched for tensors, of which it mostly is one",
    "typecheck": "2.15 opens a context for annotations that nobody uses",
}


def chosen() -> frozenset[str]:
    """The names of the trims that are on."""
    value = os.environ.get(VARIABLE, "").strip().lower()
    if value in ("", "all", "1", "true", "on", "yes"):
        return frozenset(REASONS)
    if value in ("none", "0", "false", "off", "no"):
        return frozenset()
    return frozenset(name.strip() for name in value.split(",")) & frozenset(REASONS)


def patches(
    fsdp2: Fsdp2, first: Iterable[Patch] = ()
) -> Iterable[tuple[tuple[Any, str], Wrapping]]:
    """What the chosen trims replace: owner and attribute, and the wrapt wrapper.

    Args:
        fsdp2: the FSDP2 that is loaded.
        first: wrappers that come before those of the trims, around them.
    """
    names = chosen()
    found: dict[tuple[Any, str], Wrapping] = {}
    for name, make in _TRIMS.items():
        if name in names:
            found.update({(owner, attribute): wrapper for owner, attribute, wrapper in make(fsdp2)})
    for owner, attribute, wrapper in first:
        inner = found.get((owner, attribute))
        found[owner, attribute] = wrapper if inner is None else _around(inner, wrapper)
    return found.items()


def _around(inner: Wrapping, outer: Wrapping) -> Wrapping:
    def call(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def then(*args: Any, **kwargs: Any) -> Any:
            return inner(wrapped, instance, args, kwargs)

        return outer(then, instance, args, kwargs)

    return call


def _ours(group: Any) -> bool:
    """Whether the plugin carries this group; only such groups are trimmed."""
    state = group.__dict__.get(ATTRIBUTE)
    return state is not None and state.plan.left_to_torch is None


# -- ranges ------------------------------------------------------------------------------------

_NO_RANGE = contextlib.nullcontext()


def _ranges(fsdp2: Fsdp2) -> list[Patch]:
    if not hasattr(fsdp2.group_module, "record_function"):
        return []

    def record_function(wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.autograd._profiler_enabled() or kwargs or observed():
            return wrapped(*args, **kwargs)
        return _NO_RANGE

    return [(fsdp2.group_module, "record_function", record_function)]


def observed() -> bool:
    """Whether a dispatch mode looks on: it finds the same operators as in stock.

    Selective checkpointing, for one, wants them all again in its second forward.
    """
    return bool(torch._C._len_torch_dispatch_stack())


# -- the post-backward function ----------------------------------------------------------------


def _post_backward_function(fsdp2: Fsdp2) -> list[Patch]:
    stock = getattr(fsdp2.group_module, "RegisterPostBackwardFunction", None)
    if not isinstance(stock, type) or not issubclass(stock, torch.autograd.Function):
        return []
    if not has_attributes(fsdp2.group_classes[0], "post_backward", "_register_post_backward_hook"):
        return []

    class PostBackward(stock):  # type: ignore[misc, valid-type]
        """Runs ``post_backward`` once the group's inputs have their gradients."""

        # An old-style Function keeps its context in ``forward``, and so needs no signature.
        setup_context = torch.autograd.function._SingleLevelFunction.setup_context

        @staticmethod
        def forward(ctx: Any, param_group: Any, *inputs: torch.Tensor) -> Any:
            ctx.param_group = param_group
            return inputs

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            ctx.param_group.post_backward()
            return (None, *grads)

    as_view = "post_backward_view" in chosen()

    def register(wrapped: Any, group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (
            kwargs
            or len(args) != 2
            or not _ours(group)
            or functorch_active()
            or fsdp2.compiled_autograd_enabled()
            or not fsdp2.skips_hooks()
        ):
            return wrapped(*args, **kwargs)
        inputs, keywords = args
        if not torch.is_grad_enabled():
            return inputs, keywords
        found = inputs_with_grad(inputs, keywords)
        if found is None:
            return wrapped(*args, **kwargs)
        if not found:
            return inputs, keywords
        if as_view and may_be_viewed(found) and not observed():
            ((key, tensor),) = found
            return with_inputs(
                inputs, keywords, [(key, view_before(lambda: group.post_backward(), tensor))]
            )
        outputs = PostBackward.apply(group, *[tensor for _, tensor in found])
        return with_inputs(inputs, keywords, zip((key for key, _ in found), outputs))

    cls = fsdp2.group_classes[0]
    return [(cls, "_register_post_backward_hook", register)]


def view_before(post_backward: Callable[[], Any], tensor: torch.Tensor) -> torch.Tensor:
    """A view of ``tensor`` whose node in the graph calls ``post_backward`` behind its own work.

    A hook behind the node comes after all hooks of the tensor and those before the node, and before
    others behind it: where torch's Function does the same.
    """
    view = alias(tensor)

    def behind(*_: Any) -> None:
        post_backward()

    node: Any = view.grad_fn
    node.register_hook(behind)
    return view


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A view whose backward passes the gradient on as it is, unlike that of other views."""
    return tensor[...]


def may_be_viewed(found: list[tuple[int | str, torch.Tensor]]) -> bool:
    """Whether these inputs are one tensor of which there can be a view."""
    return len(found) == 1 and found[0][1].layout is torch.strided


_PLAIN = frozenset({torch.Tensor, nn.Parameter})
_SCALARS = frozenset({type(None), int, float, bool, str, torch.dtype, torch.device})


def inputs_with_grad(
    inputs: tuple[Any, ...], keywords: dict[str, Any]
) -> list[tuple[int | str, torch.Tensor]] | None:
    """The inputs of a module that need a gradient, with their place; None if torch has to look.

    torch knows how to walk containers, and rebuilds them. Tuples without such tensors stay.
    """
    if len(inputs) == 1 and not keywords and type(inputs[0]) is torch.Tensor:
        return [(0, inputs[0])] if inputs[0].requires_grad else []
    found: list[tuple[int | str, torch.Tensor]] = []
    everything: tuple[tuple[int | str, Any], ...] = (*enumerate(inputs), *keywords.items())
    for key, value in everything:
        kind = type(value)
        if kind in _PLAIN:
            if value.requires_grad:
                found.append((key, value))
        elif kind not in _SCALARS:
            if kind is not tuple:
                return None
            for item in value:
                if type(item) not in _SCALARS and (type(item) not in _PLAIN or item.requires_grad):
                    return None
    return found


def with_inputs(
    inputs: tuple[Any, ...],
    keywords: dict[str, Any],
    changes: Iterable[tuple[int | str, torch.Tensor]],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs of a module with some of them exchanged."""
    positional: list[Any] = list(inputs)
    keywords = dict(keywords)
    for key, tensor in changes:
        if isinstance(key, int):
            positional[key] = tensor
        else:
            keywords[key] = tensor
    return tuple(positional), keywords


# -- registration ------------------------------------------------------------------------------


class Places:
    """Where the parameters of one group are registered: in the ``_parameters`` of their modules.

    What hangs off a module is looked up each time, since users replace it.
    """

    __slots__ = ("classes", "modules", "slots")

    def __init__(self, slots: list[tuple[Any, tuple[tuple[nn.Module, str], ...]]]) -> None:
        self.slots = slots
        modules = {id(module): module for _, places in slots for module, _ in places}
        self.modules = tuple(modules.values())
        self.classes = tuple(map(type, self.modules))

    @classmethod
    def of(cls, group: Any) -> Places | None:
        """None if a module brings a ``__setattr__`` of its own, which has to be called."""
        slots = []
        for fsdp_param in group.fsdp_params:
            info = fsdp_param._module_info
            places = [
                (info.module, info.param_name),
                *zip(info.shared_modules, info.shared_param_names),
            ]
            if any(type(m).__setattr__ is not nn.Module.__setattr__ for m, _ in places):
                return None
            slots.append((fsdp_param, tuple(places)))
        return cls(slots)

    def hold(self) -> bool:
        """Whether every module is still of the class that was looked at."""
        return all(map(operator.is_, map(type, self.modules), self.classes))


def _registration(fsdp2: Fsdp2) -> list[Patch]:
    stored = vars(fsdp2.param_class)
    names = ("to_sharded", "to_unsharded", "_setattr_on_modules", "free_unsharded_param")
    torchs = [(name, stored.get(name)) for name in names]
    if not all(is_untouched(function) for _, function in torchs):  # gone, or somebody else's
        return []
    fields = ("module", "param_name", "shared_modules", "shared_param_names")
    if not has_attributes(fsdp2.module_info_class, *fields):
        return []

    def places_of(group: Any) -> Places | None:
        for name, function in torchs:
            if stored[name] is not function:  # somebody patched it since
                return None
        return _places(group)

    def to_unsharded(
        wrapped: Any, group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        places = places_of(group)
        if places is None or group._sharded_state is not fsdp2.sharded:
            return wrapped(*args, **kwargs)
        for fsdp_param, where in places.slots:
            param = fsdp_param._unsharded_param
            if fsdp_param.sharded_param.requires_grad != param.requires_grad:
                param.requires_grad_(fsdp_param.sharded_param.requires_grad)
            for module, name in where:
                module._parameters[name] = param
            fsdp_param.sharded_state = fsdp2.unsharded
        group._sharded_state = fsdp2.unsharded
        return None

    def to_sharded(wrapped: Any, group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        places = places_of(group)
        if places is None or group._sharded_state is not fsdp2.unsharded:
            return wrapped(*args, **kwargs)
        # Shared memory: there is nothing to free.
        for fsdp_param, where in places.slots:
            for module, name in where:
                module._parameters[name] = fsdp_param.sharded_param
            fsdp_param.sharded_state = fsdp2.sharded
        group._sharded_state = fsdp2.sharded
        return None

    cls = fsdp2.group_classes[0]
    return [(cls, "_to_unsharded", to_unsharded), (cls, "_to_sharded", to_sharded)]


def _places(group: Any) -> Places | None:
    state = group.__dict__.get(ATTRIBUTE)
    if state is None or not state.settled:
        return None
    places = places_of(group, state)
    return places if places is not None and places.hold() else None


def places_of(group: Any, state: GroupState) -> Places | None:
    """Where the parameters of ``group`` are registered, looked up once."""
    if state.places is None and not state.places_tried:
        state.places_tried = True
        state.places = Places.of(group)
    places: Places | None = state.places
    return places


# -- the pre-backward hook ---------------------------------------------------------------------


def is_one_tensor(output: Any) -> bool:
    """Whether a module's output is one tensor to put a hook on, and no more.

    A view may be worth a warning of torch's, a subclass may hold several tensors.
    """
    return type(output) is torch.Tensor and not output._is_view() and not functorch_active()


def _pre_backward_hook(fsdp2: Fsdp2) -> list[Patch]:
    stored = vars(fsdp2.state_class)
    if not {"_register_pre_backward_hook", "_pre_backward"} <= stored.keys():
        return []

    def register(wrapped: Any, state: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) != 1 or not is_one_tensor(args[0]):
            return wrapped(*args, **kwargs)
        (output,) = args
        if output.requires_grad and torch.is_grad_enabled():
            output.register_hook(state._pre_backward)
        return output

    return [(fsdp2.state_class, "_register_pre_backward_hook", register)]


# -- DTensor construction ----------------------------------------------------------------------


def sharded_dtensor(fsdp2: Fsdp2) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """What makes a sharded gradient: torch's ``to_sharded_dtensor``, or a shorter way to the same.

    The shorter way is for a plain tensor of the parameter's own dtype and shape, so that the
    parameter's sharding spec describes it.
    """
    stock = fsdp2.param_class.to_sharded_dtensor  # type: ignore[attr-defined]

    def by_torch(fsdp_param: Any, tensor: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = fsdp_param.to_sharded_dtensor(tensor)
        return made

    new = new_dtensor(fsdp2)
    if new is None:
        return by_torch

    def directly(fsdp_param: Any, tensor: torch.Tensor) -> torch.Tensor:
        spec = fsdp_param._sharding_spec
        meta = spec.tensor_meta
        if (
            type(tensor) is not torch.Tensor
            or tensor.requires_grad
            or tensor.shape != fsdp_param.sharded_size
            or meta is None
            or meta.dtype is not tensor.dtype
            or type(fsdp_param).to_sharded_dtensor is not stock  # somebody patched it since
            or frame_callback() is not None  # torch keeps torch.compile out of ``__new__``
        ):
            return by_torch(fsdp_param, tensor)
        return new(tensor, spec)

    return directly


def new_dtensor(fsdp2: Fsdp2) -> Callable[[torch.Tensor, Any], torch.Tensor] | None:
    """What makes a DTensor of a local tensor and a sharding spec; None if that is torch's to do."""
    if "dtensor" not in chosen() or not has_attributes(fsdp2.param_class, "_sharding_spec"):
        return None
    from torch.distributed.tensor import DTensor

    new = getattr(DTensor.__new__, "__wrapped__", DTensor.__new__)
    # A partial, not a function: it is called for every gradient.
    return functools.partial(new, DTensor, requires_grad=False)


def blank_dtensor(spec: Any, local: torch.Tensor) -> Callable[[], Any]:
    """What makes DTensors that wait for their ``_spec`` and ``_local_tensor``.

    Args:
        spec: the sharding spec, which has ``tensor_meta``.
        local: a tensor of the dtype, device and layout of those local tensors.
    """
    from torch.distributed.tensor import DTensor

    meta = spec.tensor_meta
    # By position, which is parsed fastest: ..., storage offset, memory format, ...
    fixed = (DTensor, meta.shape, meta.stride, None, None, local.dtype, local.layout, local.device)
    return functools.partial(torch.Tensor._make_wrapper_subclass, *fixed)


# -- dynamo's off-switch -----------------------------------------------------------------------


def _dynamo_disable(fsdp2: Fsdp2) -> list[Patch]:
    """Only what the autograd engine calls: in forward, torch.compile must find torch's code."""
    found = []
    candidates = [(fsdp2.group_classes[0], n) for n in ("pre_backward", "post_backward")]
    if fsdp2.state_class is not None:
        candidates.append((fsdp2.state_class, "_pre_backward"))
        candidates.append((fsdp2.state_class, "_root_post_backward_final_callback"))
    for owner, name in candidates:
        function = vars(owner).get(name)
        raw = below_switch(function)
        if raw is not None:
            found.append((owner, name, _undisabled(fsdp2, raw)))
    return found


def below_switch(function: Any) -> Any:
    """What torch has put torch.compile's off-switch around; None where there is none."""
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    return getattr(function, "__wrapped__", None) if "_dynamo" in names else None


def _undisabled(fsdp2: Fsdp2, raw: Callable[..., Any]) -> Any:
    def call(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # With no frame evaluation set in this thread there is nothing to switch off.
        if nobody_traces() and fsdp2.skips_hooks():
            return raw(instance, *args, **kwargs)
        return wrapped(*args, **kwargs)

    return call


# -- type checks of later releases -------------------------------------------------------------


def _typecheck(fsdp2: Fsdp2) -> list[Patch]:
    checking = type_checking()

    def no_typecheck(wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if checking is not None and checking():
            return wrapped(*args, **kwargs)
        return _NO_RANGE

    name = "_spmd_no_typecheck"
    return [
        (module, name, no_typecheck)
        for module in (fsdp2.group_module, fsdp2.state_module)
        if hasattr(module, name)
    ]


def type_checking() -> Callable[[], bool] | None:
    """What tells whether spmd_types, which 2.13 and later know, checks tensors in this thread.

    None if there is none.
    """
    available = getattr(torch.distributed, "_is_spmd_types_available", None)
    if available is not None and available():
        found: Callable[[], bool] | None
        found = getattr(importlib.import_module("spmd_types"), "is_type_checking", None)
        return found if found is not None else _always
    return None


def _always() -> bool:
    return True


_TRIMS: dict[str, Callable[[Fsdp2], list[Patch]]] = {
    "ranges": _ranges,
    "post_backward_function": _post_backward_function,
    "registration": _registration,
    "pre_backward_hook": _pre_backward_hook,
    "dynamo_disable": _dynamo_disable,
    "typecheck": _typecheck,
}
