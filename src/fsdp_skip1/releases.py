"""What differs between torch releases, and whether this one is understood.

Everything the plugin knows about the inside of FSDP2 is gathered here, once, by looking at
the modules that are loaded: names, signatures and annotations, never a version number. The
result is one :class:`Fsdp2` value; the other rooms ask it instead of torch.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import importlib
import inspect
import operator
import sys
import types
import typing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fsdp_skip1 import others

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from fsdp_skip1.transfer import Staged

PACKAGE = "torch.distributed.fsdp._fully_shard"

# What our own code reads, calls or replaces. A torch that lacks one of these, or has changed its
# signature, is not understood.
_GROUP_SIGNATURES: dict[str, tuple[str, ...]] = {
    "unshard": ("self", "async_op"),
    "wait_for_unshard": ("self",),
    "_to_unsharded": ("self",),
    "_init_mp_dtypes": ("self",),
    "_with_fqn": ("self", "label"),
}
_PARAM_SIGNATURES: dict[str, tuple[str, ...]] = {
    "init_all_gather_outputs": (
        "self",
        "all_gather_input_numels",
        "all_gather_input_dtypes",
        "world_size",
        "device",
    ),
    "alloc_all_gather_outputs": ("self",),
    "init_unsharded_param": ("self",),
    "to_sharded_dtensor": ("self", "tensor"),
}
_STATE_SIGNATURES: dict[str, tuple[str, ...]] = {
    "_root_pre_forward": ("self", "module", "args", "kwargs"),
}
# Parameters that older releases had besides, all with a default we never override.
_OPTIONAL_PARAMETERS = frozenset({"force_recreate"})
_RESULT_FIELDS = (
    "all_gather_output",
    "all_gather_event",
    "all_gather_work",
    "param_all_gather_input_dtypes",
    "param_all_gather_input_numels",
    "all_gather_input_split_sizes",
)
# Attributes of instances. Those that come later than ``__init__`` are in _LATER_ATTRIBUTES.
GROUP_ATTRIBUTES = (
    "fsdp_params",
    "mesh_info",
    "device",
    "comm_ctx",
    "unshard_in_backward",
    "_all_gather_result",
    "_reshard_after_forward_event",
    "_sharded_state",
    "_training_state",
)
PARAM_ATTRIBUTES = (
    "sharded_param",
    "mesh_info",
    "device",
    "mp_policy",
    "offload_to_cpu",
    "pin_memory",
    "all_gather_outputs",
    "grad_offload_event",
    "_module_info",
    "_orig_size",
    "_contiguous_orig_stride",
    "_sharded_param_data",
    "sharded_size",
    "sharded_state",
    "contiguous_sharded_stride",
)
_LATER_ATTRIBUTES = ("_unsharded_param", "orig_dtype", "param_dtype")
_STATE_ATTRIBUTES = ("_state_ctx", "_device_handle", "_is_root")
_STATE_CONTEXT_ATTRIBUTES = ("all_states", "post_optim_event")
# Names under which ``foreach_reduce`` hands over what we need, on every release.
_REDUCE_REQUIRED = frozenset(
    {
        "fsdp_params",
        "unsharded_grads",
        "reduce_scatter_group",
        "reduce_scatter_stream",
        "reduce_dtype",
        "device",
        "all_reduce_group",
        "all_reduce_stream",
        "all_reduce_grads",
        "partial_reduce_output",
    }
)
_REDUCE_KNOWN = _REDUCE_REQUIRED | {
    "reduce_scatter_comm",  # 2.9+, never called at shard size 1
    "orig_dtype",  # until 2.14; then a property of each parameter
    "gradient_divide_factor",  # 2.8+
    "reduce_scatter_reduce_op",  # 2.6, 2.7: the same wish as a premultiplied sum
    "all_reduce_hook",  # 2.7+
    "allocate_memory_from_process_group",  # 2.8
    "force_sum_reduction_for_comms",  # 2.8+
    "prepare_reduce_scatter_inputs",  # 2.15: reorders shards, of which there is one
}
_REDUCE_RESULTS = (
    "Tensor, Event, Event, Tensor, Event, Tensor",
    "Tensor, Event, Stream, Event, Tensor, Event, Tensor",  # 2.13+
)
_DIVIDE_REQUIRED = frozenset({"reduce_scatter_group", "all_reduce_group", "reduce_dtype"})
_DIVIDE_KNOWN = _DIVIDE_REQUIRED | {"device_type", "factor", "force_sum_reduction_for_comms"}


class NotUnderstood(Exception):
    """This torch's FSDP2 does not look the way the plugin expects.

    Attributes:
        found: what is there, in words.
        expected: what was looked for, in words.
    """

    def __init__(self, found: str, expected: str) -> None:
        super().__init__(f"found {found}; expected {expected}")
        self.found = found
        self.expected = expected


class ReduceArgs:
    """The arguments of one ``foreach_reduce`` call, by name, with what a release lacks filled in.

    ``orig_dtype`` stays absent where the release keeps it on each parameter.
    """

    __slots__ = (
        "all_reduce_grads",
        "all_reduce_group",
        "all_reduce_hook",
        "all_reduce_stream",
        "device",
        "force_sum",
        "fsdp_params",
        "grads",
        "has_orig_dtype",
        "orig_dtype",
        "partial_reduce_output",
        "premultiplied_op",
        "reduce_dtype",
        "reduce_scatter_group",
        "reduce_scatter_stream",
        "user_divide_factor",
    )

    def __init__(self, names: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        given = dict(zip(names, args))
        given.update(kwargs)
        self.fsdp_params: list[Any] = given["fsdp_params"]
        self.grads: list[torch.Tensor] = given["unsharded_grads"]
        self.reduce_scatter_group = given["reduce_scatter_group"]
        self.reduce_scatter_stream = given["reduce_scatter_stream"]
        self.has_orig_dtype = "orig_dtype" in given
        self.orig_dtype: torch.dtype | None = given.get("orig_dtype")
        self.reduce_dtype: torch.dtype | None = given["reduce_dtype"]
        self.device: torch.device = given["device"]
        self.user_divide_factor: float | None = given.get("gradient_divide_factor")
        self.premultiplied_op = given.get("reduce_scatter_reduce_op")
        self.all_reduce_group = given["all_reduce_group"]
        self.all_reduce_stream = given["all_reduce_stream"]
        self.all_reduce_grads: bool = given["all_reduce_grads"]
        self.partial_reduce_output: torch.Tensor | None = given["partial_reduce_output"]
        self.all_reduce_hook: Callable[[torch.Tensor], None] | None = given.get("all_reduce_hook")
        self.force_sum: bool = given.get("force_sum_reduction_for_comms", False)


@dataclass(frozen=True)
class ReduceLayout:
    """How this release calls ``foreach_reduce`` and what it wants back."""

    names: tuple[str, ...]
    returns_stream: bool  # 2.13+: the stream of the last operation comes third

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> ReduceArgs:
        return ReduceArgs(self.names, args, kwargs)

    def result(
        self,
        reduce_scatter_input: Any,  # what has to live until ``reduce_scatter_event``
        reduce_scatter_event: Any,
        post_reduce_stream: Any,
        post_reduce_event: Any,
        all_reduce_input: torch.Tensor | None = None,
        all_reduce_event: Any = None,
        partial_reduce_output: torch.Tensor | None = None,
    ) -> tuple[Any, ...]:
        head = (reduce_scatter_input, reduce_scatter_event)
        tail = (post_reduce_event, all_reduce_input, all_reduce_event, partial_reduce_output)
        return (*head, post_reduce_stream, *tail) if self.returns_stream else (*head, *tail)


@dataclass(frozen=True)
class Fsdp2:
    """The FSDP2 that is loaded, as far as the plugin needs it."""

    group_module: Any
    state_module: Any
    param_class: type
    module_info_class: type | None  # ParamModuleInfo: the places of a parameter in its modules
    group_classes: tuple[type, ...]
    reduce_modules: tuple[Any, ...]
    state_class: type
    result_type: Any  # AllGatherResult
    sharded: Any  # ShardedState members
    unsharded: Any
    forward: Any  # TrainingState members
    pre_backward: Any
    training_states: Any
    mesh_info: Any  # the module that defines FSDPMeshInfo and, from 2.10, DDPMeshInfo
    traceable: bool  # 2.6 - 2.11: torch.compile may trace into FSDP2 itself
    compiled_autograd_enabled: Callable[[], bool]
    divide_factors: Callable[..., Any]
    divide_factor_names: tuple[str, ...]
    reduce: ReduceLayout | None
    reduce_reason: str | None  # why ``reduce`` is None

    def is_shard_mesh(self, mesh_info: Any) -> bool:
        """Whether the mesh has a shard dimension (FSDP, HSDP); else it is replicate only."""
        return isinstance(mesh_info, self.mesh_info.FSDPMeshInfo)

    def is_replicate_only(self, mesh_info: Any) -> bool:
        """``replicate()`` from 2.10 on: a mesh with no shard dimension at all."""
        ddp = getattr(self.mesh_info, "DDPMeshInfo", None)
        return ddp is not None and isinstance(mesh_info, ddp) and not self.is_shard_mesh(mesh_info)

    def skips_hooks(self) -> bool:
        """Whether FSDP2's hooks stay out of torch.compile's graphs; only 2.6 - 2.11 let you ask."""
        if not self.traceable:
            return True
        dynamo = sys.modules.get("torch._dynamo")
        config = getattr(dynamo, "config", None)
        return bool(getattr(config, "skip_fsdp_hooks", True))

    def pending(self, group: Any, staged: Staged | None = None) -> Any:
        """An ``AllGatherResult`` that says: unshard was called, ``staged`` is all to wait for.

        torch drops it where nobody waits, and what is staged goes with it.
        """
        if staged is not None:
            return self.result_type(staged, staged.event, None, [], [], [])
        placeholder = getattr(group, "_all_gather_output", None)
        if placeholder is None:
            placeholder = torch.empty(0, device=group.device)
        return self.result_type(placeholder, None, None, [], [], [])

    def release_all_gather_state(self, group: Any) -> None:
        """Let go of the previous group's all-gather output, as stock does in forward.

        Only a neighbour whose shard mesh is larger than 1 leaves one behind.
        """
        context = group.comm_ctx
        state = getattr(context, "all_gather_state", None)
        if state is None:
            return
        release = getattr(context, "release_all_gather_state_for_comm_reuse", None)
        if release is not None:  # 2.15+
            release()
        else:
            group._wait_all_gather_streams_on_event(state.event)
            context.all_gather_state = None

    def renew_dtypes(self, group: Any) -> None:
        """Resolve the mixed-precision dtypes again if ``module.to(dtype)`` changed them.

        torch does it only at lazy initialization, so that such a cast after the first forward
        leaves it copying between dtypes that no longer match.
        """
        for fsdp_param in group.fsdp_params:
            if getattr(fsdp_param, "orig_dtype", None) not in (
                None,
                fsdp_param.sharded_param.dtype,
            ):
                break
        else:
            return
        group._init_mp_dtypes()
        order = getattr(group, "_init_reduce_scatter_param_order", None)
        if order is not None:  # 2.15+: gradients are packed by dtype
            order()
        for fsdp_param in group.fsdp_params:
            unsharded = getattr(fsdp_param, "_unsharded_param", None)
            if unsharded is not None and hasattr(fsdp_param, "unsharded_grad_dtype"):  # 2.15+
                unsharded.grad_dtype = fsdp_param.unsharded_grad_dtype


def preserve_versions(tensors: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
    """Write to ``tensors`` without autograd noticing: a refill restores what was there before."""
    if _PRESERVES_MANY:
        preserve: Any = torch.autograd._unsafe_preserve_version_counter
        return typing.cast("contextlib.AbstractContextManager[Any]", preserve(tuple(tensors)))
    stack = contextlib.ExitStack()
    for tensor in tensors:
        one: Any = torch.autograd._unsafe_preserve_version_counter
        stack.enter_context(one(tensor))
    return stack


_PRESERVES_MANY = (
    "tensors" in inspect.signature(torch.autograd._unsafe_preserve_version_counter).parameters
)


def storage_holders(tensor: torch.Tensor) -> int:
    """How many tensors hold the storage of ``tensor``, itself included."""
    storage = tensor.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count - 1  # ``storage`` itself


functorch_active: Callable[[], bool] = getattr(
    torch._C, "_are_functorch_transforms_active", lambda: False
)
"""Whether a functorch transform is on in this thread."""


def groups_of(state: Any) -> list[Any]:
    """The parameter groups of one FSDP2 state."""
    many = getattr(state, "_fsdp_param_groups", None)  # 2.12+
    if many is not None:
        return list(many)
    one = state._fsdp_param_group
    return [] if one is None else [one]


def copies_instead(function: Any) -> bool:
    """Whether stock copies at shard size 1, where older releases issue a collective.

    Args:
        function: torch's own ``wait_for_unshard`` (copies from 2.9 on) or ``foreach_reduce``
            (from 2.10 on).
    """
    return "copy_" in function.__code__.co_names


def divides_by_one(function: Any) -> bool:
    """Whether stock's ``foreach_reduce`` divides by a factor of 1, as it does up to 2.14."""
    return not any(type(c) is float and c == 1 for c in function.__code__.co_consts)


def read() -> Fsdp2:
    """Look at the FSDP2 that is loaded.

    Raises:
        NotUnderstood: if something that the plugin builds on is missing, has changed, or was
            replaced by somebody else.
    """
    group_module = _module("_fsdp_param_group")
    collectives = _module("_fsdp_collectives")
    param_module = _module("_fsdp_param")
    common = _module("_fsdp_common")
    state_module = _module("_fsdp_state")

    group_classes = _every_class("FSDPParamGroup", group_module)
    param_class = _class(param_module, "FSDPParam")
    state_class = _class(state_module, "FSDPState")
    for cls in group_classes:
        _check_group_class(cls)
    _check_signatures(param_class, _PARAM_SIGNATURES)
    _check_property(param_class, "all_gather_inputs")
    _check_attributes(param_class, (*PARAM_ATTRIBUTES, *_LATER_ATTRIBUTES))
    _check_signatures(state_class, _STATE_SIGNATURES)
    _check_attributes(state_class, _STATE_ATTRIBUTES)
    _check_attributes(state_class, ("_fsdp_param_groups", "_fsdp_param_group"), one_is_enough=True)
    _check_attributes(_class(state_module, "FSDPStateContext"), _STATE_CONTEXT_ATTRIBUTES)
    _check_communication(group_module, group_classes)
    _check_attributes(_class(common, "FSDPMeshInfo"), ("shard_mesh_size",))
    result_type = _attribute(collectives, "AllGatherResult")
    fields = getattr(result_type, "_fields", None)
    if fields != _RESULT_FIELDS:
        raise NotUnderstood(f"AllGatherResult with fields {fields}", f"the fields {_RESULT_FIELDS}")
    sharded_state = _attribute(param_module, "ShardedState")
    training_state = _attribute(common, "TrainingState")
    divide = _attribute(collectives, "_get_gradient_divide_factors")
    divide_names = _parameters(divide)
    _check_names("_get_gradient_divide_factors", divide_names, _DIVIDE_REQUIRED, _DIVIDE_KNOWN)
    reduce_modules = tuple(
        module for module in (group_module, collectives) if hasattr(module, "foreach_reduce")
    )
    _attribute(collectives, "foreach_reduce")
    layout, reason = _reduce_layout(reduce_modules)
    if layout is not None and "orig_dtype" not in layout.names:
        _check_attributes(param_class, ("sharded_grad_dtype",))

    return Fsdp2(
        group_module=group_module,
        state_module=state_module,
        param_class=param_class,
        module_info_class=getattr(param_module, "ParamModuleInfo", None),
        group_classes=group_classes,
        reduce_modules=reduce_modules,
        state_class=state_class,
        result_type=result_type,
        sharded=_attribute(sharded_state, "SHARDED"),
        unsharded=_attribute(sharded_state, "UNSHARDED"),
        forward=_attribute(training_state, "FORWARD"),
        pre_backward=_attribute(training_state, "PRE_BACKWARD"),
        training_states=training_state,
        mesh_info=common,
        traceable=hasattr(common, "compiled_autograd_enabled"),
        compiled_autograd_enabled=getattr(common, "compiled_autograd_enabled", lambda: False),
        divide_factors=divide,
        divide_factor_names=divide_names,
        reduce=layout,
        reduce_reason=reason,
    )


def has_attributes(cls: type | None, *names: str) -> bool:
    """Whether instances of ``cls`` have all these attributes, for what can be done without them."""
    return cls is not None and _attributes_of(cls).issuperset(names)


def missing_attributes(group: Any) -> list[str]:
    """Instance attributes that the plugin reads and this group, or one of its parameters, lacks."""
    missing = [f"FSDPParamGroup.{name}" for name in GROUP_ATTRIBUTES if not hasattr(group, name)]
    if "FSDPParamGroup.fsdp_params" not in missing:
        for fsdp_param in group.fsdp_params[:1]:
            missing += [
                f"FSDPParam.{name}" for name in PARAM_ATTRIBUTES if not hasattr(fsdp_param, name)
            ]
    return missing


def _every_class(name: str, module: Any) -> tuple[type, ...]:
    """Each class object that goes by ``name`` in the package.

    There is one, unless somebody reloaded a module: then the modules that were not reloaded
    still build their groups from the old class.
    """
    first = _class(module, name)
    found = {id(first): first}
    for module_name, other in list(sys.modules.items()):
        if module_name.startswith(PACKAGE + ".") and isinstance(vars(other).get(name), type):
            found.setdefault(id(vars(other)[name]), vars(other)[name])
    return tuple(found.values())


def _module(name: str) -> Any:
    try:
        return importlib.import_module(f"{PACKAGE}.{name}")
    except ImportError as error:
        raise NotUnderstood(f"no module {PACKAGE}.{name}", "FSDP2 of torch 2.6 or newer") from error


def _attribute(owner: Any, name: str) -> Any:
    value = getattr(owner, name, None)
    if value is None:
        where = getattr(owner, "__name__", repr(owner))
        raise NotUnderstood(f"no {name} in {where}", f"{where}.{name}")
    return value


def _class(module: Any, name: str) -> type:
    value = _attribute(module, name)
    if not isinstance(value, type):
        raise NotUnderstood(f"{name} is {others.describe(value)}", f"a class {name}")
    return value


def _parameters(function: Any) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()


def _check_group_class(cls: type) -> None:
    for name in ("unshard", "wait_for_unshard"):
        function = others.of_class(cls, name)
        if function is not None and others.leads_to_torch(function, name, cls) is None:
            raise NotUnderstood(
                f"{cls.__name__}.{name} replaced by {others.describe(function)}",
                "torch's own method, or a wrapper around it",
            )
    _check_signatures(cls, _GROUP_SIGNATURES)
    _check_property(cls, "is_unsharded")
    _check_attributes(cls, GROUP_ATTRIBUTES)


def _check_communication(group_module: Any, group_classes: Iterable[type]) -> None:
    """How a group lets go of a neighbour's all-gather output."""
    context = _class(group_module, "FSDPCommContext")
    _check_attributes(context, ("all_gather_state",))
    if others.of_class(context, "release_all_gather_state_for_comm_reuse") is None:  # until 2.14
        for cls in group_classes:
            _check_signatures(cls, {"_wait_all_gather_streams_on_event": ("self", "event")})


def _check_property(cls: type, name: str) -> None:
    if not isinstance(inspect.getattr_static(cls, name, None), property):
        raise NotUnderstood(
            f"no property {name} on {cls.__name__}", f"a property {cls.__name__}.{name}"
        )


def _check_signatures(cls: type, expected: dict[str, tuple[str, ...]]) -> None:
    for name, names in expected.items():
        # Of torch's own function: what others put around it may hide the signature.
        function = _attribute(cls, name)
        function = others.leads_to_torch(others.of_class(cls, name), name, cls) or function
        found = tuple(n for n in _parameters(function) if n not in _OPTIONAL_PARAMETERS)
        if found != names and found not in (("args", "kwargs"), ("self", "args", "kwargs")):
            raise NotUnderstood(
                f"{cls.__name__}.{name}({', '.join(found)})",
                f"{cls.__name__}.{name}({', '.join(names)})",
            )


def _check_attributes(cls: type, names: Iterable[str], *, one_is_enough: bool = False) -> None:
    """Look for instance attributes before there is an instance: does any method set them?"""
    present = _attributes_of(cls)
    missing = [name for name in names if name not in present]
    if missing and not (one_is_enough and len(missing) < len(tuple(names))):
        raise NotUnderstood(
            f"no {'/'.join(missing)} in {cls.__name__}",
            ", ".join(f"{cls.__name__}.{name}" for name in missing),
        )


_attributes_seen: dict[type, tuple[list[Any], frozenset[str]]] = {}


def _attributes_of(cls: type) -> frozenset[str]:
    """Names that instances may have: of the class, annotated, or set by one of its methods."""
    values = [v for base in cls.__mro__[:-1] for v in vars(base).values()]
    seen = _attributes_seen.get(cls)
    if seen is not None and len(seen[0]) == len(values) and all(map(operator.is_, seen[0], values)):
        return seen[1]
    names: set[str] = set()
    for base in cls.__mro__[:-1]:
        names.update(vars(base), vars(base).get("__annotations__", ()))
        for value in vars(base).values():
            # Whatever others have put around a method, the one that sets attributes is below.
            for function in others.walk(value, base):
                if type(function) is types.FunctionType:
                    names.update(_stored_by(function.__code__))
    _attributes_seen[cls] = values, frozenset(names)
    return _attributes_seen[cls][1]


@functools.lru_cache(maxsize=1024)
def _stored_by(code: types.CodeType) -> frozenset[str]:
    """Names of the attributes that the code, or a function defined in it, assigns to."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname == "STORE_ATTR"}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _stored_by(constant)
    return frozenset(names)


def _reduce_layout(modules: Iterable[Any]) -> tuple[ReduceLayout | None, str | None]:
    """How ``foreach_reduce`` is called; or None and the reason, if it is not torch's any more."""
    function: Any = None
    for module in modules:
        current = vars(module)["foreach_reduce"]
        function = others.leads_to_torch(current, "foreach_reduce", module)
        if function is None:
            return None, (
                f"found foreach_reduce replaced by {others.describe(current)}, "
                "expected torch's own function, or a wrapper around it"
            )
    names = _parameters(function)
    _check_names("foreach_reduce", names, _REDUCE_REQUIRED, _REDUCE_KNOWN)
    kinds = _kinds_returned(function)
    if kinds not in _REDUCE_RESULTS:
        raise NotUnderstood(
            f"foreach_reduce with the results {kinds}",
            f"the results {' or '.join(_REDUCE_RESULTS)}",
        )
    return ReduceLayout(names=names, returns_stream="Stream" in kinds), None


def _kinds_returned(function: Any) -> str:
    """What a function returns, by its annotation; a number where its code returns another."""
    annotation = inspect.signature(function).return_annotation
    if isinstance(annotation, str):
        slots = ast.parse(annotation, mode="eval").body
        inner = slots.slice if isinstance(slots, ast.Subscript) else slots
        items = [ast.unparse(item) for item in getattr(inner, "elts", ())]
    else:
        items = [str(item) for item in typing.get_args(annotation)]
    counts = _tuples_returned(function.__code__)
    if counts and counts != {len(items)}:
        return f"{sorted(counts)} in number, {len(items)} by its annotation"
    kinds = ("Tensor", "Stream", "Event")
    return ", ".join(next((kind for kind in kinds if kind in item), item) for item in items)


@functools.lru_cache(maxsize=4)
def _tuples_returned(code: types.CodeType) -> frozenset[int]:
    found, before = set(), None
    for instruction in dis.get_instructions(code):
        if (
            instruction.opname == "RETURN_VALUE"
            and before is not None
            and before.opname == "BUILD_TUPLE"
            and before.arg is not None
        ):
            found.add(before.arg)
        before = instruction
    return frozenset(found)


def _check_names(
    function: str, names: Iterable[str], required: frozenset[str], known: frozenset[str]
) -> None:
    present = set(names)
    lost, new = sorted(required - present), sorted(present - known)
    if lost or new:
        parts = [f"without {', '.join(lost)}"] if lost else []
        parts += [f"with an unknown {', '.join(new)}"] if new else []
        raise NotUnderstood(f"{function} {' and '.join(parts)}", "the parameters of torch 2.6-2.15")
