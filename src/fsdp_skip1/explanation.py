"""What the plugin does with each parameter group of a model, and why.

It shows the plan that the runtime carries out, or would carry out if it were on; so what it says
is what runs. It only reads, and communicates with nobody. Who has a model to explain has torch; so
this room imports nothing of it before it is asked.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import fsdp_skip1
from fsdp_skip1 import activation, notices
from fsdp_skip1.text import aligned, columns, plural, size, some

if TYPE_CHECKING:
    from torch import nn

    from fsdp_skip1.plan import GroupPlan, ReducePlan
    from fsdp_skip1.releases import Fsdp2
    from fsdp_skip1.savings import Stock

_OTHER_RELEASE = "use a torch release that the plugin supports"
_LAST = "import fsdp_skip1 last, or call fsdp_skip1.enable() again"
_CAUSES = {
    (True, "import"): "the package was imported",
    (True, "call"): "enable() was called",
    (True, "variable"): "the variable FSDP_SKIP1 asks for it",
    (False, "import"): "another copy of the package has taken over",
    (False, "call"): "disable() was called",
    (False, "variable"): "the variable FSDP_SKIP1 forbids it",
}


def explain(model: nn.Module) -> Explanation:
    """Say what the plugin does with each FSDP2 parameter group of a model.

    Works before the first forward as well as after it, on any rank, and with the plugin off: then
    it says what would run. Communicates with nobody and changes nothing.

    Args:
        model: A module with `fully_shard` or `replicate` applied to it, or to modules inside it.

    Returns:
        An `Explanation`: `print` it, or take its `to_dict()`.

    Raises:
        TypeError: If `model` is not a module.
    """
    if not hasattr(model, "named_modules"):
        raise TypeError(f"explain() takes a torch.nn.Module, not {type(model).__name__}")
    found = list(_groups(model))
    view = _View() if found else None
    return Explanation(
        version=fsdp_skip1.__version__,
        torch=torch_release(),
        rank=notices.rank(),
        on=fsdp_skip1.is_enabled(),
        wanted=activation.decision().on,
        why=why(),
        zero_copy=activation.decision().zero_copy,
        initialized=all(group.is_root is None for group in found),
        message=None if found else _nothing_found(model),
        groups=tuple(view.row(group) for group in found) if view is not None else (),
    )


@dataclass(frozen=True)
class LeftToTorch:
    """What of a group torch's own code does, why, and what would change that."""

    what: str
    reason: str
    way_out: str | None


@dataclass(frozen=True)
class Row:
    """One parameter group.

    Attributes:
        fqn: Name of its module in the model, or names, with commas; "" for the model itself.
        mesh: Sizes of the mesh dimensions that it lives on: "replicate", "shard", or both.
        mesh_names: The names that these dimensions have in the mesh, if any.
        shard_size: Size of the shard dimension, 1 if there is none; None if the mesh is unknown.
        replicas: Size of the replicate dimension, 1 if there is none.
        parameters: How many parameters it has.
        bytes: What they hold, unsharded, in the dtype in which they are kept.
        unshard: Number of parameters for each way of unsharding them.
        unshard_bytes: Their bytes, likewise.
        unshard_reasons: Why, for each way but "shared".
        reduce: How its gradients are reduced.
        reduce_reason: Why.
        left_to_torch: What torch's own code does.
        launches_saved: Operators, collectives among them, that a step saves against stock.
        bytes_saved: Bytes that these would have written.
        adopted: Whether the runtime has the group in hand; else this is what it will decide.
    """

    fqn: str
    mesh: dict[str, int]
    mesh_names: dict[str, str]
    shard_size: int | None
    replicas: int
    parameters: int
    bytes: int
    unshard: dict[str, int]
    unshard_bytes: dict[str, int]
    unshard_reasons: dict[str, list[str]]
    reduce: str
    reduce_reason: str
    left_to_torch: tuple[LeftToTorch, ...]
    launches_saved: int
    bytes_saved: int
    adopted: bool

    def to_dict(self) -> dict[str, Any]:
        """The same as plain dictionaries and lists."""
        return {**asdict(self), "left_to_torch": [asdict(left) for left in self.left_to_torch]}


@dataclass(frozen=True, repr=False)
class Explanation:
    """What the plugin does with a model. Prints as a table.

    Attributes:
        version: This package's version.
        torch: torch's release.
        rank: The rank that speaks.
        on: Whether the plugin is on; else the rows say what it would do.
        wanted: Whether it should be on.
        why: Who turned it on or off.
        zero_copy: Whether parameters may share memory.
        initialized: Whether FSDP2 has seen the first forward. Before it, dtypes are as the
            mixed-precision policy asks.
        message: What to say instead of a table, where there is no parameter group.
        groups: One row a parameter group.
    """

    version: str
    torch: str
    rank: int
    on: bool
    wanted: bool
    why: str
    zero_copy: bool
    initialized: bool
    message: str | None
    groups: tuple[Row, ...]

    def totals(self) -> dict[str, Any]:
        """Sums over all groups."""
        unshard: Counter[str] = Counter()
        nbytes: Counter[str] = Counter()
        for row in self.groups:
            unshard.update(row.unshard)
            nbytes.update(row.unshard_bytes)
        return {
            "groups": len(self.groups),
            "groups_left_to_torch": sum(bool(row.left_to_torch) for row in self.groups),
            "parameters": sum(row.parameters for row in self.groups),
            "bytes": sum(row.bytes for row in self.groups),
            "unshard": dict(unshard),
            "unshard_bytes": dict(nbytes),
            "launches_saved": sum(row.launches_saved for row in self.groups),
            "bytes_saved": sum(row.bytes_saved for row in self.groups),
        }

    def to_dict(self) -> dict[str, Any]:
        """The same as plain dictionaries and lists, for `json.dumps`."""
        fields = {name: value for name, value in vars(self).items() if name != "groups"}
        groups = [row.to_dict() for row in self.groups]
        return {**fields, "groups": groups, "totals": self.totals()}

    def __str__(self) -> str:
        if self.message is not None:
            return self.message
        return "\n".join([self._head(), "", *self._table(), "", *self._notes()])

    __repr__ = __str__

    def _head(self) -> str:
        state = f"on ({self.why})"
        if not self.on:
            state = f"off ({self.why}), so this is what it would do"
            if self.wanted:
                state = f"wanted ({self.why}), but it does not work here"
        head = f"fsdp_skip1 {self.version} on torch {self.torch}, rank {self.rank}: {state}."
        if not self.initialized:
            head += "\nBefore the first forward: dtypes are those that the policy asks for."
        return head

    def _table(self) -> list[str]:
        totals = self.totals()
        rows = [
            ["parameter group", "mesh", "params", "size", "unshard", "reduce", "saved a step"],
            *(_cells(row) for row in self.groups),
            [
                f"{totals['groups']} in all",
                "",
                str(totals["parameters"]),
                size(totals["bytes"]),
                _counts(totals["unshard"]),
                "",
                _saved(totals["launches_saved"], totals["bytes_saved"]),
            ],
        ]
        lines = aligned(rows, right=(2, 3))
        rule = "  ".join("-" * len(part) for part in columns(rows))
        return [lines[0], rule, *lines[1:-1], rule, lines[-1]]

    def _notes(self) -> list[str]:
        notes: dict[str, list[str]] = {}
        for row in self.groups:
            for how, reasons in row.unshard_reasons.items():
                for reason in reasons:
                    notes.setdefault(f"unshard {how}: {reason}", []).append(row.fqn)
            if not any("reduction" in left.what for left in row.left_to_torch):
                notes.setdefault(f"reduce {row.reduce}: {row.reduce_reason}", []).append(row.fqn)
            for left in row.left_to_torch:
                text = f"{left.what} left to torch: {left.reason}"
                if left.way_out:
                    text += f"; way out: {left.way_out}"
                notes.setdefault(text, []).append(row.fqn)
        lines = []
        for text, names in notes.items():
            where = "" if len(names) == len(self.groups) else f" [{some(names)}]"
            lines.append(f"{text}{where}")
        lines.append(
            "saved a step: what stock FSDP2 of this release does beyond this in one forward and "
            "backward:\n    operators that move data, collectives, and the bytes they write; "
            "counted from the code"
        )
        return lines


def first_forward(root: Any) -> str:
    """A line for the log, about the model under an FSDP2 root state."""
    module = root._modules[0]
    explanation = explain(module)
    totals = explanation.totals()
    ways = [
        f"{number} {how} ({size(totals['unshard_bytes'][how])})"
        for how, number in totals["unshard"].items()
    ]
    return (
        f"first forward of {type(module).__name__}: {plural(totals['groups'], 'group')}, "
        f"{plural(totals['parameters'], 'parameter')}, {size(totals['bytes'])}: "
        f"{', '.join(ways)}; a step saves "
        f"{_saved(totals['launches_saved'], totals['bytes_saved'])}"
    )


@dataclass(frozen=True)
class _Group:
    """A parameter group that was found in a model."""

    group: Any
    fqn: str
    is_root: bool | None  # before lazy initialization: whether that will find it at the root


class _View:
    """What rows are made with: the FSDP2 that is loaded, as the runtime sees it."""

    def __init__(self) -> None:
        from fsdp_skip1 import patch
        from fsdp_skip1.releases import NotUnderstood
        from fsdp_skip1.savings import Stock

        self.fsdp2: Fsdp2 | None = patch.running()
        self.running = self.fsdp2 is not None
        self.obstacle: tuple[str, str] | None = None
        self.stock: Stock | None = None
        try:
            self.fsdp2 = self.fsdp2 or patch.look()
        except NotUnderstood as error:
            self.obstacle = f"this torch is not understood: {error}", _OTHER_RELEASE
        if self.fsdp2 is not None:
            self.stock = Stock(self.fsdp2)
            if self.fsdp2.compiled_autograd_enabled():
                self.obstacle = "compiled autograd is on", "switch compiled autograd off"

    def row(self, found: _Group) -> Row:
        from fsdp_skip1.savings import saved, unshards

        group = found.group
        plan, adopted = self._plan(group)
        reduction = self._reduction(group, plan)
        parameters = list(getattr(group, "fsdp_params", ()))
        ways = [(param.how.value, param.reason) for param in plan.params]
        if plan.left_to_torch is not None:
            ways = [("left to torch", "")] * len(parameters)
        numbers: Counter[str] = Counter()
        nbytes: Counter[str] = Counter()
        reasons: dict[str, list[str]] = {}
        for parameter, (how, reason) in zip(parameters, ways):
            numbers[how] += 1
            nbytes[how] += _nbytes(parameter)
            if reason and how != "shared" and reason not in reasons.setdefault(how, []):
                reasons[how].append(reason)
        launches = bytes_saved = 0
        if self.stock is not None and plan.shard_size == 1:
            times = unshards(group, is_root=found.is_root)
            work = saved(self.stock, group, plan, reduction, times)
            launches, bytes_saved = work.launches, work.nbytes
        return Row(
            fqn=found.fqn,
            mesh=_mesh(group),
            mesh_names=_mesh_names(group),
            shard_size=plan.shard_size or None,
            replicas=plan.replicas,
            parameters=len(parameters),
            bytes=sum(map(_nbytes, parameters)),
            unshard=dict(numbers),
            unshard_bytes=dict(nbytes),
            unshard_reasons=reasons,
            reduce=str(reduction),
            reduce_reason=reduction.reason,
            left_to_torch=_left(plan, reduction),
            launches_saved=launches,
            bytes_saved=bytes_saved,
            adopted=adopted,
        )

    def _plan(self, group: Any) -> tuple[GroupPlan, bool]:
        """The plan, and whether it is the runtime's own."""
        from fsdp_skip1 import patch
        from fsdp_skip1.plan import GroupPlan, plan_group
        from fsdp_skip1.unshard import ATTRIBUTE

        if self.fsdp2 is None:
            sizes = _mesh(group)
            plan = GroupPlan(sizes.get("shard", 1), sizes.get("replicate", 1), ())
            adopted = False
        else:
            state = vars(group).get(ATTRIBUTE) if self.running else None
            adopted = state is not None
            if state is not None:
                plan = state.plan
            else:
                zero_copy = activation.decision().zero_copy
                plan = plan_group(self.fsdp2, group, zero_copy=zero_copy)
        if plan.left_to_torch is None and self.obstacle is not None:
            return _leave(plan, *self.obstacle), adopted
        stranger = patch.taken_over(group) if self.running else None
        if plan.left_to_torch is None and stranger is not None:
            return _leave(plan, stranger, _LAST), adopted
        return plan, adopted

    def _reduction(self, group: Any, plan: GroupPlan) -> ReducePlan:
        """How gradients are reduced, which may be torch's business alone."""
        from fsdp_skip1 import patch
        from fsdp_skip1.plan import ReducePlan, Reduction, plan_group, plan_reduce

        if self.fsdp2 is None or self.obstacle is not None:
            reason, way_out = plan.left_to_torch or "", plan.way_out
            return ReducePlan(Reduction.TORCH, reason, plan.replicas, way_out)
        if plan.left_to_torch is not None:
            # Who replaces unshard leaves the reduction to us.
            plan = plan_group(self.fsdp2, group, zero_copy=True)
        for point in patch.points() if self.running else ():
            if (
                point.name == "foreach_reduce"
                and point.owner is self.fsdp2.group_module
                and plan.left_to_torch is None
                and not point.holds()
            ):
                from fsdp_skip1.others import describe

                reason = f"foreach_reduce was replaced by {describe(point.current)}"
                return ReducePlan(Reduction.TORCH, reason, plan.replicas, _LAST)
        return plan_reduce(self.fsdp2, group, plan)


def _leave(plan: GroupPlan, reason: str, way_out: str | None) -> GroupPlan:
    from fsdp_skip1.plan import GroupPlan

    return GroupPlan(plan.shard_size, plan.replicas, (), reason, way_out)


def _left(plan: GroupPlan, reduction: ReducePlan) -> tuple[LeftToTorch, ...]:
    from fsdp_skip1.plan import Reduction

    of_plan = of_reduction = None
    if plan.left_to_torch is not None:
        of_plan = plan.left_to_torch, plan.way_out
    if reduction.how is Reduction.TORCH:
        of_reduction = reduction.reason, reduction.way_out
    if of_plan is not None and of_plan == of_reduction:
        return (LeftToTorch("unshard and reduction", *of_plan),)
    both = ("unshard", of_plan), ("reduction", of_reduction)
    return tuple(LeftToTorch(what, *left) for what, left in both if left is not None)


def _groups(model: Any) -> Iterator[_Group]:
    """Every parameter group of a model, once, in the order of its modules."""
    states = sys.modules.get(f"{activation.FSDP2}._fsdp_state")
    state_of = getattr(states, "_get_module_state", None)
    state_class = getattr(states, "FSDPState", None)
    if state_of is None or state_class is None:
        return
    from fsdp_skip1.releases import groups_of

    names = {id(module): name for name, module in model.named_modules()}
    seen: set[int] = set()
    roots: list[str] = []
    for name, module in model.named_modules():
        state = state_of(module)
        if not isinstance(state, state_class) or id(state) in seen:
            continue
        seen.add(id(state))
        is_root = None
        if state._is_root is None:
            inside = any(not root or name.startswith(f"{root}.") for root in roots)
            is_root = not inside and getattr(state, "_auto_reshard_after_forward", True)
        roots.append(name)
        for group in groups_of(state):
            modules = [names[id(m)] for m in group.modules if id(m) in names]
            yield _Group(group, ", ".join(modules) or name, is_root)


def _nothing_found(model: Any) -> str:
    name = type(model).__name__
    for module in model.modules():
        for cls in type(module).__mro__:
            if cls.__name__ == "FullyShardedDataParallel":
                return (
                    f"{name} has no FSDP2 module. It is wrapped in FSDP1 "
                    "(FullyShardedDataParallel), which fsdp_skip1 leaves alone."
                )
    return (
        f"{name} has no FSDP2 module: neither fully_shard() nor replicate() was applied to it "
        "or to a module inside it."
    )


def _mesh(group: Any) -> dict[str, int]:
    found = {kind: getattr(group.mesh_info, f"{kind}_mesh_size", None) for kind in _KINDS}
    return {kind: int(length) for kind, length in found.items() if length is not None}


def _mesh_names(group: Any) -> dict[str, str]:
    names = getattr(group.mesh_info.mesh, "mesh_dim_names", None) or ()
    dims = {kind: getattr(group.mesh_info, f"{kind}_mesh_dim", None) for kind in _KINDS}
    return {
        kind: str(names[dim])
        for kind, dim in dims.items()
        if isinstance(dim, int) and dim < len(names)
    }


_KINDS = ("replicate", "shard")


def _nbytes(fsdp_param: Any) -> int:
    return int(fsdp_param._orig_size.numel() * fsdp_param.sharded_param.dtype.itemsize)


def _cells(row: Row) -> list[str]:
    return [
        row.fqn or "(model)",
        ", ".join(f"{kind} {length}" for kind, length in row.mesh.items()) or "unknown",
        str(row.parameters),
        size(row.bytes),
        _counts(row.unshard),
        row.reduce,
        _saved(row.launches_saved, row.bytes_saved),
    ]


def _counts(numbers: dict[str, int]) -> str:
    if len(numbers) == 1:
        return next(iter(numbers))
    return ", ".join(f"{number} {how}" for how, number in numbers.items())


def _saved(launches: int, nbytes: int) -> str:
    return f"{plural(launches, 'launch')}, {size(nbytes)}" if launches or nbytes else "nothing"


def why() -> str:
    """Who turned the plugin on or off."""
    wanted = activation.decision()
    return _CAUSES[wanted.on, wanted.cause]


def torch_release() -> str:
    """Of the torch that is loaded, without loading it."""
    torch = sys.modules.get("torch")
    return "not imported" if torch is None else str(getattr(torch, "__version__", "unknown"))
