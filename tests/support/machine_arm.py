"""One arm of the state machine: a tiny interpreter of operations on one model.

It lives in a process of its own, builds the model that a :class:`Spec` describes, carries out one
:class:`Op` after the other, and reports after each what a user could see, to the bit. An operation
is one method of :class:`Arm`; what the release or the model lacks is left out, in every arm alike.
"""

import copy
import gc
import io
import itertools
import pickle
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from support import features
from support.arms import PLAIN, PLUGIN, STOCK, Image, make_mesh, param_groups


@dataclass(frozen=True)
class Spec:
    """A model, how it is sharded, and its optimizer."""

    dtype: str = "float32"
    param_dtype: str = ""
    reduce_dtype: str = ""
    output_dtype: str = ""
    dim: int = 3
    hidden: int = 4
    norm: bool = False
    dropout: bool = False
    kind: str = "stack"  # or "shared": one block at two places; "branches": a step uses some
    depth: int = 2
    tied: bool = False
    odd: str = ""  # a parameter unlike the others: "int", "half", "empty", "unused"; or a "pair"
    checkpoint: str = ""  # "inside" or "outside" of the sharded block, or "reentrant"
    wrap: str = "blocks"  # or "root", "inner", "grouped"; "entry": that one as well
    mesh: tuple[int, ...] = (1,)  # () is ``replicate()``
    columns: bool = False  # sharded along the second dimension
    reshard: bool | None = True
    offload: bool = False
    frozen: tuple[int, ...] = ()
    optimizer: str = "sgd"
    foreach: bool = False
    on: bool = True
    zero_copy: bool = True

    def __repr__(self) -> str:
        return _call("Spec", {k: v for k, v in vars(self).items() if v != getattr(Spec, k)})


@dataclass(frozen=True)
class Op:
    """One operation: the name of a method of :class:`Arm`, and its arguments."""

    name: str
    arguments: dict[str, Any]

    def __repr__(self) -> str:
        return _call(f"op.{self.name}", self.arguments)


def _call(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})"


class _Ops:
    def __getattr__(self, name: str) -> Callable[..., Op]:
        return lambda **arguments: Op(name, arguments)


#: ``op.forward(seed=1)`` is an :class:`Op`; failures are printed in this form.
op = _Ops()


@dataclass
class Report:
    """What one operation left behind.

    ``facts`` are for the judge's decisions; ``broken`` are invariants that this arm alone can see.
    """

    records: dict[str, Image] = field(default_factory=dict)
    error: str = ""
    trace: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)


class Boom(Exception):
    """Raised by a planted fault."""


# - The model


class Block(nn.Module):
    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(spec.dim) if spec.norm else nn.Identity()
        self.up = nn.Linear(spec.dim, spec.hidden)
        self.down = nn.Linear(spec.hidden, spec.dim, bias=False)
        self.dropout = nn.Dropout(0.25) if spec.dropout else nn.Identity()
        self.checkpoint = spec.checkpoint == "inside"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpoint and torch.is_grad_enabled():
            return x + checkpoint(self.branch, x, use_reentrant=False)
        return x + self.branch(x)

    def branch(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class Net(nn.Module):
    """An entry, some blocks, an exit; small enough to leave the time to FSDP2."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.kind, self.checkpoint = spec.kind, spec.checkpoint
        self.entry = nn.Linear(spec.dim, spec.dim, bias=not spec.tied)
        blocks = [Block(spec) for _ in range(spec.depth)]
        if spec.kind == "shared":
            blocks.append(blocks[0])
        self.blocks = nn.ModuleList(blocks)
        self.exit = nn.Linear(spec.dim, spec.dim, bias=False)
        if spec.tied:
            self.exit.weight = self.entry.weight
        self.register_buffer("scale", torch.full((spec.dim,), 0.75))
        self.active = 0
        self.scales = spec.odd == "half"
        if spec.odd == "int":
            self.odd = nn.Parameter(torch.arange(3), requires_grad=False)
        elif spec.odd == "half":
            odd = torch.linspace(0.5, 1.5, spec.dim, dtype=torch.float16)
            self.odd = nn.Parameter(odd, requires_grad=False)
        elif spec.odd == "empty":
            self.odd = nn.Parameter(torch.empty(0, 2))
        elif spec.odd == "unused":
            self.odd = nn.Parameter(torch.ones(1, 5))
        elif spec.odd == "pair":  # autograd gives both gradients the same memory
            self.odd = nn.Parameter(torch.ones(1, spec.dim))
            self.pair = nn.Parameter(torch.ones(spec.dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.entry(x)
        for index, block in enumerate(self.blocks):
            if self.kind == "branches" and index != self.active % len(self.blocks):
                continue
            if self.checkpoint in ("outside", "reentrant") and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=self.checkpoint == "reentrant")
            else:
                x = block(x)
        if hasattr(self, "pair"):
            x = x + (self.odd.view(-1, 1) + self.pair.view(-1, 1)).view(-1).to(x.dtype)
        if self.scales:
            x = x * self.odd.to(x.dtype)
        return self.exit(x) * self.scale.to(x.dtype)


def _dtype(name: str) -> torch.dtype | None:
    return getattr(torch, name) if name else None


def build(spec: Spec) -> Net:
    torch.manual_seed(5)
    net = Net(spec)
    dtype = _dtype(spec.dtype)
    for module in net.modules():  # not ``.to``: the odd parameter keeps its dtype
        for name, parameter in module._parameters.items():
            odd = name == "odd" and spec.odd != "pair"
            if parameter is not None and not odd and parameter.dtype != dtype:
                parameter.data = parameter.data.to(dtype)
    if spec.odd in ("empty", "unused"):
        net.odd.data = net.odd.data.to(dtype)
    trainable = [p for p in net.parameters() if p.requires_grad]
    for index in spec.frozen:
        trainable[index % len(trainable)].requires_grad_(False)
    return net


def shard(net: Net, spec: Spec) -> None:
    policy = MixedPrecisionPolicy(
        param_dtype=_dtype(spec.param_dtype),
        reduce_dtype=_dtype(spec.reduce_dtype),
        output_dtype=_dtype(spec.output_dtype),
    )
    offload = CPUOffloadPolicy(pin_memory=False) if spec.offload else OffloadPolicy()
    apply: Callable[..., Any] = fully_shard
    options: dict[str, Any] = {"mp_policy": policy, "offload_policy": offload}
    if spec.mesh:
        options |= {"mesh": make_mesh(spec.mesh), "reshard_after_forward": spec.reshard}
        if spec.columns:
            options["shard_placement_fn"] = lambda p: Shard(1) if p.ndim > 1 else None
    else:
        from torch.distributed._composable.replicate_with_fsdp import replicate

        apply = replicate
        public = features.has("replicate mesh argument")
        shape, names = ((1,), ("replicate",)) if public else ((1, 1), ("replicate", "shard"))
        options["mesh"] = make_mesh(shape, names)
    blocks = list(dict.fromkeys(net.blocks))
    if spec.wrap == "grouped":
        apply(blocks, **options)
    elif spec.wrap != "root":
        for block in blocks:
            if spec.wrap == "inner":
                apply(block.up, **options)
            apply(block, **options)
    if spec.wrap == "entry":
        apply(net.entry, **options)
    apply(net, **options)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.float().pow(2).mean() + output.float().sin().sum() * 0.1


# - The interpreter


class Arm:
    """The interpreter; one for each process, with a new model at each :meth:`begin`."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.skip1: Any = None
        if kind == PLUGIN:
            import fsdp_skip1

            self.skip1 = fsdp_skip1
        elif kind == STOCK and "fsdp_skip1" in sys.modules:
            sys.modules["fsdp_skip1"].disable()
        self.collectives = _count_collectives()
        self.on = self.sharing = self.switched = False
        self.net: Any = None
        gc.collect()
        gc.freeze()

    @property
    def fsdp(self) -> bool:
        return self.kind != PLAIN

    def begin(self, spec: Spec) -> Report:
        """Forgets the last model and builds the next."""
        self.__dict__.pop("optimizer", None)
        self.net = self.graphs = self.handles = self.held = self.names = self.hooks = None
        self.identities = self.unsynced = self.unsharded_seen = self._fsdp_params = None
        gc.collect()
        self.spec = spec
        self.net = build(spec)
        self._toggle("off")
        #: Pending losses.
        self.graphs: list[torch.Tensor] = []
        self.handles: list[Any] = []
        #: Tensors that the user keeps.
        self.held: list[torch.Tensor] = []
        self.hooks: list[Any] = []
        #: Switches of the plugin that are still to come, see :meth:`plant`.
        self.planted = 0
        #: What hooks of the user have seen since the last report.
        self.log: list[Image] = []
        self.sync = self.all_reduce = True
        self.divide: float | None = None
        self.unsynced: dict[str, torch.Tensor] = {}
        plain = {id(p): name for name, p in self.net.named_parameters()}
        self.names = list(plain.values())
        if self.fsdp:
            if spec.on:
                self._toggle("on" if spec.zero_copy else "copy")
            shard(self.net, spec)
        self.identities = {name: id(self.parameter(name)) for name in self.names}
        self.unsharded_seen: dict[str, Any] = {}
        self.set_optimizer(spec.optimizer, spec.foreach)
        return self._report("")

    def do(self, operation: Op) -> Report:
        self.log.clear()
        self.switched = not self.on
        self.extra: dict[str, Any] = {}
        self.collectives.clear()
        error = trace = ""
        try:
            getattr(self, operation.name)(**operation.arguments)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
            trace = traceback.format_exc(limit=-8)
        return self._report(error, trace)

    # - What is seen

    def parameter(self, name: str) -> torch.Tensor:
        """The plain or the sharded parameter, whatever is registered at this moment."""
        fsdp_param = self.fsdp_params().get(name) if self.fsdp else None
        if fsdp_param is not None:
            return fsdp_param.sharded_param
        owner, attribute = self._place(name)
        return owner._parameters[attribute]

    def fsdp_params(self) -> dict[str, Any]:
        found = self.__dict__.get("_fsdp_params")
        if found is None or found[0] is not self.net:
            modules = {id(m): name for name, m in self.net.named_modules()}
            by_name = {}
            for group in param_groups(self.net):
                for fsdp_param in group.fsdp_params:
                    info = fsdp_param._module_info
                    prefix = modules[id(info.module)]
                    by_name[f"{prefix}.{info.param_name}".lstrip(".")] = fsdp_param
            found = self._fsdp_params = (self.net, by_name, param_groups(self.net))
        return found[1]

    def groups(self) -> list[Any]:
        self.fsdp_params()
        return self._fsdp_params[2]

    def _place(self, name: str) -> tuple[nn.Module, str]:
        path, _, attribute = name.rpartition(".")
        return self.net.get_submodule(path), attribute

    def parameters(self) -> list[torch.Tensor]:
        return [self.parameter(name) for name in self.names]

    def _report(self, error: str, trace: str = "") -> Report:
        report = Report(error=error, trace=trace)
        records = report.records
        for key, value in self.__dict__.pop("extra", {}).items():
            records[key] = value if isinstance(value, Image) else Image.of(value)
        for index, image in enumerate(self.log):
            records[f"seen by hook {index}"] = image
        for name in self.names:
            parameter = self.parameter(name)
            records[f"param {name}"] = Image.of(parameter)
            if parameter.grad is not None:
                records[f"grad {name}"] = Image.of(parameter.grad)
        for index, tensor in enumerate(self.held):
            records[f"held {index}"] = Image.of(tensor)
        report.facts = {"graphs": len(self.graphs), "grown": self.__dict__.pop("grown", 0)}
        if self.fsdp:
            self._report_fsdp(report)
        return report

    def _report_fsdp(self, report: Report) -> None:
        records = report.records
        unsharded = pending = False
        for index, group in enumerate(self.groups()):
            state = (
                group._sharded_state.name,
                group._training_state.name,
                group._all_gather_result is not None,
                *{p.sharded_state.name for p in group.fsdp_params},
            )
            records[f"fsdp/group {index}"] = Image.of(str(state))
            if group._sharded_state.name == "UNSHARDED":
                unsharded = True
            pending = pending or group._all_gather_result is not None
        moved, replaced = [], []
        for name, fsdp_param in self.fsdp_params().items():
            if id(fsdp_param.sharded_param) != self.identities[name]:
                moved.append(name)
            whole = getattr(fsdp_param, "_unsharded_param", None)
            if self.unsharded_seen.get(name) not in (None, id(whole)):
                replaced.append(name)
            self.unsharded_seen[name] = None if whole is None else id(whole)
            self._report_memory(report, name, fsdp_param)
            owner, attribute = self._place(name)
            registered = owner._parameters[attribute]
            if registered is not fsdp_param.sharded_param:
                records[f"fsdp/unsharded {name}"] = Image.of(registered)
                if registered.grad is not None:
                    records[f"fsdp/unsharded grad {name}"] = Image.of(registered.grad)
            records[f"fsdp/trains {name}"] = Image.of(
                (fsdp_param.sharded_param.requires_grad, registered.requires_grad)
            )
        records["fsdp/other objects"] = Image.of(str((moved, replaced)))
        report.facts |= {
            "handles": len(self.handles),
            "unsharded": unsharded,
            "pending": pending,
            "may_share": self.sharing or self.planted > 0,
            "may_be_off": not self.on or self.planted > 0,
        }
        if self.kind == PLUGIN:
            report.broken += self.__dict__.pop("waiting", [])
            if self.skip1.is_enabled() != self.on:
                report.broken.append(f"is_enabled() is not {self.on}")
            if self.collectives and not self.switched:
                report.broken.append(f"collectives over one rank: {self.collectives}")
            for index, group in enumerate(self.groups()):
                if not self.on and "_fsdp_skip1" in vars(group):
                    report.broken.append(f"off, and group {index} still has our attribute")

    def _report_memory(self, report: Report, name: str, fsdp_param: Any) -> None:
        data = fsdp_param._sharded_param_data
        local = getattr(fsdp_param.sharded_param, "_local_tensor", data)
        for what, tensor in (("data", data), ("parameter", local)):
            needed = tensor.numel() * tensor.element_size()
            if tensor.untyped_storage().size() < needed:
                report.broken.append(f"{name}: the storage of the sharded {what} was freed")
        whole = getattr(fsdp_param, "_unsharded_param", None)
        if self.kind == PLUGIN and not self.on and whole is not None and data.numel():
            if whole.untyped_storage().data_ptr() == data.untyped_storage().data_ptr():
                report.broken.append(f"off, and {name} still shares its memory")

    # - Passes

    def forward(
        self,
        *,
        seed: int = 0,
        where: int = -1,
        mode: str = "grad",
        grad_input: bool = False,
        active: int = 0,
    ) -> None:
        """Runs the root or one block, and keeps the loss for a later backward."""
        module = self._module(where)
        self.net.active = active
        x = torch.randn(2, self.spec.dim, generator=torch.Generator().manual_seed(seed))
        x = x.to(self._input_dtype(where)).requires_grad_(grad_input and mode == "grad")
        if mode == "inference" and self._torch_may_run():
            self._make_unsharded_parameters()
        torch.manual_seed(seed)  # for dropout
        modes = {"grad": torch.enable_grad, "no_grad": torch.no_grad}
        with modes.get(mode, torch.inference_mode)():
            output = self._call(module, x)
            self.extra["output"] = output.clone()
            loss = loss_of(output)
            self.extra["loss"] = loss.clone()
        if mode == "grad" and loss.requires_grad:
            self.graphs.append(loss)

    def evaluate(self, *, on: bool = True) -> None:
        """``eval()``, or back to ``train()``."""
        self.net.train(not on)

    def _input_dtype(self, where: int) -> torch.dtype:
        name = "down.weight" if where >= 0 else "entry.weight"
        path = "" if where < 0 else f"blocks.{where % len(self.net.blocks)}."
        if self.spec.kind == "shared" and where >= 0:
            path = f"blocks.{where % len(self.net.blocks) % self.spec.depth}."
        return self.parameter(path + name).dtype

    def _call(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        spec = self.spec
        if self.fsdp or not spec.param_dtype:
            return module(x)
        dtype = _dtype(spec.param_dtype)
        cast = {n: p.to(dtype) for n, p in module.named_parameters() if p.is_floating_point()}
        output = torch.func.functional_call(module, cast, (x.to(dtype),))
        return output.to(_dtype(spec.output_dtype) or output.dtype)

    def _torch_may_run(self) -> bool:
        """Whether a forward may be stock's, at least from some moment on."""
        return self.kind == STOCK or (self.kind == PLUGIN and (not self.on or self.planted > 0))

    def _make_unsharded_parameters(self) -> None:
        """Stock makes them in inference mode, where they can never train: make them before.

        With them there, stock is right, and stays something to compare with.
        """
        for group in self.groups():
            if all(hasattr(p, "_unsharded_param") for p in group.fsdp_params):
                continue
            group.lazy_init()
            for p in group.fsdp_params:
                data = p._sharded_param_data
                p.init_all_gather_outputs(
                    [data.numel()], [p.param_dtype or data.dtype], 1, p.device
                )
                p.alloc_all_gather_outputs()
                with torch.no_grad():
                    p.init_unsharded_param()
                p.free_unsharded_param()

    def backward(
        self, *, which: int = 0, retain: bool = False, both: bool = False, create: bool = False
    ) -> None:
        if not self.graphs:
            return
        count = len(self.graphs)
        chosen = {which % count, (which + 1) % count} if both else {which % count}
        loss = torch.stack([self.graphs[i] for i in sorted(chosen)]).sum()
        if not retain:
            self.graphs = [g for i, g in enumerate(self.graphs) if i not in chosen]
        self._backward(loss, retain_graph=retain or create, create_graph=create)

    def _backward(self, loss: torch.Tensor, **options: bool) -> None:
        if self.fsdp:
            loss.backward(**options)
            return
        # A backward without sync leaves the sharded gradients alone; the next with sync brings all.
        before = {name: self.parameter(name).grad for name in self.names}
        for name in self.names:
            self.parameter(name).grad = self.unsynced.get(name)
        loss.backward(**options)
        self.unsynced = {
            n: self.parameter(n).grad for n in self.names if self.parameter(n).grad is not None
        }
        sync = self.sync and (self.all_reduce or self.spec.mesh == (1,))
        for name in self.names:
            parameter, old = self.parameter(name), before[name]
            new = self.unsynced.pop(name, None) if sync else None
            if new is not None and self.divide not in (None, 1.0):
                new = new.div(self.divide)
            if old is not None and new is not None:
                old.add_(new)
            parameter.grad = new if old is None else old

    def repeat(self, *, times: int = 4) -> None:
        """The same step again and again: no tensor may be left behind by one."""
        self.graphs.clear()
        self.handles.clear()
        self.optimizer.zero_grad()
        counts = []
        for _ in range(times):
            self.forward(seed=1)
            if self.graphs:
                self._backward(self.graphs.pop())
            self.optimizer.zero_grad()
            self.extra.clear()
            self.log.clear()
            counts.append(_live_tensors())
        # A leak grows at every step; a cache that fills up somewhere does so once.
        self.grown = min(after - before for before, after in itertools.pairwise(counts[1:]))
        if self.kind == PLUGIN and self.spec.kind != "branches":
            self.waiting = [
                f"{name}: still copied although nobody holds its buffer any more"
                for group in self.groups()
                if "_fsdp_skip1" in vars(group)
                for name, plan in zip(self._names_of(group), vars(group)["_fsdp_skip1"].plan.params)
                if plan.provisional
            ]

    def _names_of(self, group: Any) -> list[str]:
        names = {id(p): name for name, p in self.fsdp_params().items()}
        return [names[id(p)] for p in group.fsdp_params]

    def drop(self) -> None:
        """Forwards whose backward never comes."""
        self.graphs.clear()

    def _module(self, where: int) -> nn.Module:
        """The root (-1), the entry (-2) or a block."""
        if where < 0:
            return self.net if where == -1 else self.net.entry
        return self.net.blocks[where % len(self.net.blocks)]

    # - Gradients and the optimizer

    def set_optimizer(self, kind: str = "sgd", foreach: bool = False) -> None:
        parameters = [p for p in self.parameters() if p.is_floating_point()]
        options = {"foreach": foreach}
        if kind == "adamw":
            self.optimizer = torch.optim.AdamW(parameters, lr=0.01, eps=1e-3, **options)
        elif kind == "fused":
            self.optimizer = torch.optim.AdamW(parameters, lr=0.01, eps=1e-3, fused=True)
        else:
            momentum = 0.9 if kind == "momentum" else 0.0
            self.optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=momentum, **options)

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def clip(self, *, norm: float = 0.1, foreach: bool = False) -> None:
        norm = nn.utils.clip_grad_norm_(self.parameters(), norm, foreach=foreach)
        self.extra["norm"] = norm

    def scale_grads(self, *, factor: float = 0.5) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def set_grad(self, *, which: int = 0, value: float | None = None) -> None:
        """A gradient set by hand, or taken away."""
        parameter = self._which(which)
        grad = None if value is None else torch.full_like(parameter.detach(), value)
        parameter.grad = grad

    def hold(self, *, which: int = 0, what: str = "grad") -> None:
        """Keep a gradient, or what ``state_dict`` gave, beyond the next steps."""
        if what == "grad":
            grad = self._which(which).grad
            if grad is not None:
                self.held.append(grad)
        else:
            values = self.net.state_dict()
            self.held.append(values[sorted(values)[which % len(values)]])
        del self.held[:-2]

    def let_go(self) -> None:
        self.held.clear()
        self.handles.clear()

    def _which(self, which: int) -> torch.Tensor:
        return self.parameter(self.names[which % len(self.names)])

    def freeze(self, *, which: int = 0, trains: bool = False) -> None:
        self._which(which).requires_grad_(trains)

    def write(self, *, which: int = 0, factor: float = 0.5) -> None:
        """An in-place write to a sharded parameter, as an average of weights makes."""
        with torch.no_grad():
            self._which(which).mul_(factor)

    def point_elsewhere(self, *, which: int = 0) -> None:
        """Other memory with other values for a parameter that is unsharded, behind FSDP2's back."""
        owner, attribute = self._place(self.names[which % len(self.names)])
        parameter = owner._parameters[attribute]
        if self.fsdp and not isinstance(parameter, DTensor):
            parameter.data = parameter.data * 0.5

    # - Hooks of the user

    def hook(self, *, kind: str = "accumulate", which: int = 0, where: int = 0) -> None:
        """One that stays: after accumulation, on the unsharded parameter, a module or its output."""
        if kind == "accumulate":
            parameter = self._which(which)
            if self.fsdp:
                handle = parameter.register_post_accumulate_grad_hook(self._look)
                self.hooks.append(handle)
        elif kind == "gradient":
            owner, attribute = self._place(self.names[which % len(self.names)])
            parameter = owner._parameters[attribute]
            if self.fsdp and parameter is self._which(which):
                return  # sharded: such a hook would never fire
            self.hooks.append(parameter.register_hook(self._halve))
        elif kind == "module":
            look = lambda module, before, after: self._look_inside(after[0])  # noqa: E731
            self.hooks.append(self._module(where).register_full_backward_hook(look))
        else:
            look = lambda module, args, output: self._look_inside(output)  # noqa: E731
            self.hooks.append(self._module(where).register_forward_hook(look))

    def _look(self, parameter: torch.Tensor) -> None:
        self.log.append(Image.of(parameter.grad))

    def _halve(self, grad: torch.Tensor) -> torch.Tensor:
        self._look_inside(grad)
        return grad * 0.5

    def _look_inside(self, tensor: torch.Tensor) -> None:
        """In the middle of a pass: a tensor, and which groups are unsharded."""
        self.log.append(Image.of(tensor))
        if self.fsdp:
            self.log.append(Image.of(str([group._sharded_state.name for group in self.groups()])))

    def unhook(self) -> None:
        for handle in self.hooks:
            handle.remove()
        self.hooks.clear()

    def step_in_backward(self, *, which: int = 0) -> None:
        """An optimizer step as soon as a gradient is there, as optimizer-in-backward does."""
        parameter = self._which(which)

        def update(p: torch.Tensor) -> None:
            with torch.no_grad():
                p.add_(p.grad, alpha=-0.05)
            p.grad = None

        if parameter.is_floating_point():
            self.hooks.append(parameter.register_post_accumulate_grad_hook(update))

    def plant(self, *, where: int = 0, moment: str = "forward", action: str = "raise") -> None:
        """Something that happens once, in the middle of the next forward or backward."""
        spent: list[bool] = []
        switches = action in ("on", "off", "copy")
        self.planted += switches

        def act(*unused: Any) -> None:
            if spent:
                return
            spent.append(True)
            self.planted -= switches
            for handle in handles:
                handle.remove()
            if action == "raise":
                raise Boom
            if action == "reshard":
                if self.fsdp:
                    self._reshard(where + 1)
            elif action == "unshard":
                if self.fsdp:
                    self._unshard(where + 1)
            else:
                self._toggle(action)

        def at_output(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            if moment == "forward":
                act()
            elif output.requires_grad and not spent:
                output.register_hook(act)

        target = self._module(where)
        inner = getattr(target, "down", target)
        if moment == "accumulate":
            parameter = self._which(where)
            handles = [parameter.register_post_accumulate_grad_hook(act)] if self.fsdp else []
        elif moment == "before":
            handles = [target.register_forward_pre_hook(act)]
        else:
            handles = [inner.register_forward_hook(at_output)]

    # - FSDP2 by hand

    def unshard(self, *, where: int = -1, wait: str = "sync") -> None:
        """``sync``, ``async`` and waited for at once, ``later``, or ``never``."""
        if self.fsdp:
            self._unshard(where, wait)

    def _unshard(self, where: int, wait: str = "sync") -> None:
        module = self._module(where)
        if isinstance(module, FSDPModule):
            handle = module.unshard(async_op=wait != "sync")
            if wait == "async":
                handle.wait()
            elif wait == "later":
                self.handles.append(handle)

    def wait(self) -> None:
        while self.handles:
            self.handles.pop().wait()

    def reshard(self, *, where: int | None = None) -> None:
        if not self.fsdp:
            return
        if where is None:
            for module in self._fsdp_modules():
                module.reshard()
        else:
            self._reshard(where)

    def _reshard(self, where: int) -> None:
        module = self._module(where)
        if isinstance(module, FSDPModule):
            module.reshard()

    def _fsdp_modules(self) -> list[FSDPModule]:
        return [m for m in self.net.modules() if isinstance(m, FSDPModule)]

    def reset_iter_state(self) -> None:
        if self.fsdp and hasattr(self.net, "reset_iter_state"):
            self.net.reset_iter_state()

    def prefetch(self, *, kind: str = "forward", shift: int = 1, on: bool = True) -> None:
        if not self.fsdp:
            return
        modules = self._fsdp_modules()
        for index, module in enumerate(modules):
            others = [modules[(index + shift) % len(modules)]] if on else []
            getattr(module, f"set_modules_to_{kind}_prefetch")(others)

    def setter(self, *, name: str, value: Any, where: int = -1) -> None:
        """A setter of ``FSDPModule``, on the root and below, or on one block alone."""
        if name == "set_requires_gradient_sync":
            self.sync = value
        elif name == "set_requires_all_reduce":
            self.all_reduce = value
        module = self._module(where)
        if self.fsdp and isinstance(module, FSDPModule) and hasattr(module, name):
            getattr(module, name)(value)

    def divide_factor(self, *, factor: float = 4.0) -> None:
        self.divide = factor
        if self.fsdp:
            for module in self._fsdp_modules():
                features.set_divide_factor(module, factor)

    def all_reduce_hook(self, *, factor: float = 0.5) -> None:
        if self.fsdp and hasattr(self.net, "set_all_reduce_hook"):
            for module in self._fsdp_modules():
                module.set_all_reduce_hook(lambda tensor: tensor.mul_(factor))

    # - State dicts and storages

    def state_dict(self) -> None:
        for name, value in self.net.state_dict().items():
            self.extra[f"state {name}"] = value

    def load(self, *, assign: bool = False, factor: float = 0.5, where: int = -1) -> None:
        """Other values, copied in or put in place of the parameters."""
        module = self._module(where)
        with torch.no_grad():
            state = {n: v * factor if v.is_floating_point() else v.clone()
                     for n, v in module.state_dict().items()}  # fmt: skip
        module.load_state_dict(state, assign=assign)
        if assign:
            self._new_objects()

    def duplicate(self, *, what: str = "state") -> None:
        """Copies and pickles. FSDP2 refuses whole models, the plugin with it."""
        if what == "deepcopy":
            self._refuses(copy.deepcopy)
        elif what == "pickle":
            self._refuses(pickle.dumps)
        elif what == "child":
            state = copy.deepcopy(self.net.exit)._parameters
            self.extra["fsdp/copied"] = state["weight"]
        elif what == "optimizer":
            self.optimizer.load_state_dict(_through_pickle(self.optimizer.state_dict()))
        else:
            self.net.load_state_dict(_through_pickle(self.net.state_dict()))

    def _refuses(self, function: Callable[[Any], Any]) -> None:
        error = ""
        if self.fsdp:
            try:
                function(self.net)
            except Exception as raised:
                error = type(raised).__name__
        self.extra["fsdp/refused"] = error

    def swap(self, *, how: str = "apply", which: int = 0) -> None:
        """The same values in other memory."""
        if how == "swap_tensors":
            parameter = self._which(which)
            with torch.no_grad():
                other = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            other.grad = parameter.grad
            torch.utils.swap_tensors(parameter, other)
            self.net._apply(lambda t: t)
        elif how == "empty":
            for parameter in self.parameters():
                parameter.grad = None
            with torch.no_grad():
                state = {n: v.clone() for n, v in self.net.state_dict().items()}
            try:
                self.net.to_empty(device="cpu")
            finally:  # with a graph pending it may fail half-way, and leave memory without values
                for parameter in self.parameters():
                    getattr(parameter, "_local_tensor", parameter).data.zero_()
            self.net.load_state_dict(state)
        else:
            self.net._apply(torch.clone)
        self._new_objects()

    def to(self, *, dtype: str = "float32") -> None:
        self.net.to(_dtype(dtype))
        self._new_objects()

    def _new_objects(self) -> None:
        """What replaces parameters needs a new optimizer, and may change identities."""
        self.extra["fsdp/moved"] = str(
            [n for n in self.names if id(self.parameter(n)) != self.identities[n]]
        )
        self.identities = {name: id(self.parameter(name)) for name in self.names}
        self.set_optimizer(self.spec.optimizer, self.spec.foreach)

    # - The plugin

    def toggle(self, *, action: str = "off", thread: bool = False) -> None:
        if thread:
            runner = threading.Thread(target=self._toggle, args=(action,))
            runner.start()
            runner.join()
        else:
            self._toggle(action)

    def _toggle(self, action: str) -> None:
        if self.kind != PLUGIN:
            return
        self.switched = True  # torch's own code may have run in this operation, too
        self.on, self.sharing = action != "off", action == "on"
        if self.on:
            assert self.skip1.enable(zero_copy=self.sharing)
        else:
            self.skip1.disable()


def _through_pickle(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _live_tensors() -> int:
    gc.collect()
    return sum(1 for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))


def _count_collectives() -> dict[str, int]:
    """Counts what FSDP2 issues itself; all go over one rank here."""
    counts: dict[str, int] = {}

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return function(*args, **kwargs)

        return call

    for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"):
        function = counted(name, getattr(dist, name))
        setattr(dist, name, function)
    return counts
