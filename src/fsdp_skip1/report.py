"""What the plugin does, for people and for programs: `explain`, `status` and `stats`.

This room only reads. `explain` shows the plan that the runtime carries out, or would carry out if
it were on; so what it says is what runs. Nothing here imports torch: who has a model to explain
has torch.
"""

from __future__ import annotations

import os
import platform
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import fsdp_skip1
from fsdp_skip1 import activation, notices
from fsdp_skip1.counters import counters

if TYPE_CHECKING:
    from torch import nn

    from fsdp_skip1.points import PatchPoint
    from fsdp_skip1.plan import GroupPlan, ReducePlan
    from fsdp_skip1.releases import Fsdp2
    from fsdp_skip1.savings import Stock

RELEASES = "2.6 to 2.15"
VARIABLES = (
    "FSDP_SKIP1",
    "FSDP_SKIP1_LOG",
    "FSDP_SKIP1_TRIMS",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
)

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


# --- explain ----------------------------------------------------------------------------------


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
        torch=_torch_release(),
        rank=notices.rank(),
        on=fsdp_skip1.is_enabled(),
        why=_why(),
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
        fqn: Name of its module in the model, or names, separated by commas; "" for the model itself.
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
                _size(totals["bytes"]),
                _counts(totals["unshard"]),
                "",
                _saved(totals["launches_saved"], totals["bytes_saved"]),
            ],
        ]
        lines = _aligned(rows, right=(2, 3))
        rule = "  ".join("-" * len(part) for part in _columns(rows))
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
            where = "" if len(names) == len(self.groups) else f" [{_some(names)}]"
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
        f"{number} {how} ({_size(totals['unshard_bytes'][how])})"
        for how, number in totals["unshard"].items()
    ]
    return (
        f"first forward of {type(module).__name__}: {_plural(totals['groups'], 'group')}, "
        f"{_plural(totals['parameters'], 'parameter')}, {_size(totals['bytes'])}: "
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
            size = getattr(group.mesh_info, "shard_mesh_size", 1)
            replicas = getattr(group.mesh_info, "replicate_mesh_size", 1)
            plan, adopted = GroupPlan(size, replicas, ()), False
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
    from fsdp_skip1.patch import groups_of

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
    sizes = {kind: getattr(group.mesh_info, f"{kind}_mesh_size", None) for kind in _KINDS}
    return {kind: int(size) for kind, size in sizes.items() if size is not None}


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
        ", ".join(f"{kind} {size}" for kind, size in row.mesh.items()) or "unknown",
        str(row.parameters),
        _size(row.bytes),
        _counts(row.unshard),
        row.reduce,
        _saved(row.launches_saved, row.bytes_saved),
    ]


def _counts(numbers: dict[str, int]) -> str:
    if len(numbers) == 1:
        return next(iter(numbers))
    return ", ".join(f"{number} {how}" for how, number in numbers.items())


def _saved(launches: int, nbytes: int) -> str:
    return f"{_plural(launches, 'launch')}, {_size(nbytes)}" if launches or nbytes else "nothing"


# --- status -----------------------------------------------------------------------------------


def status() -> Status:
    """Say whether the plugin is on, why, and what it has patched. Does not import torch.

    Returns:
        A `Status`: `print` it, or take its `to_dict()`. Never raises.
    """
    wanted = activation.decision()
    on = fsdp_skip1.is_enabled()
    loaded = activation.FSDP2 in sys.modules
    patch = sys.modules.get("fsdp_skip1.patch")
    fsdp2 = patch.running() if patch is not None else None
    obstacle = None
    if wanted.on and not on:
        obstacle = _obstacle(loaded)
    elif on and fsdp2 is None and loaded:
        obstacle = "not at work yet"
    trims = sys.modules.get("fsdp_skip1.trims")
    return Status(
        version=fsdp_skip1.__version__,
        python=platform.python_version(),
        torch=_torch_release(),
        rank=notices.rank(),
        on=on,
        why=_why(),
        obstacle=obstacle,
        waiting=on and not loaded,
        zero_copy=wanted.zero_copy,
        reduction=_reduction_of(fsdp2),
        trims={name: name in trims.chosen() for name in trims.REASONS} if trims and fsdp2 else {},
        patched=tuple(_patched(p) for p in patch.points()) if patch is not None else (),
        releases=RELEASES,
        variables={name: os.environ[name] for name in VARIABLES if name in os.environ},
    )


@dataclass(frozen=True)
class Patched:
    """One attribute that the plugin has replaced.

    Attributes:
        target: Module, class and name.
        holds: Whether calls still arrive at the plugin.
        others: Who else wraps it, or has replaced it.
    """

    target: str
    holds: bool
    others: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class Status:
    """Whether the plugin is on, why, and what it has patched. Prints as text.

    Attributes:
        version: This package's version.
        python: Python's release.
        torch: torch's release, or what there is to say instead.
        rank: The rank that speaks.
        on: Whether it is on.
        why: Who turned it on or off.
        obstacle: What keeps it from working although it should be on.
        waiting: Whether it is on, and torch's FSDP2 has not been imported yet.
        zero_copy: Whether parameters may share memory.
        reduction: "patched", or why it is left to torch; None while nothing is patched.
        trims: Each trim of hook overhead, and whether it is on.
        patched: What is replaced.
        releases: The torch releases that this version knows.
        variables: Environment variables that matter, as far as they are set.
    """

    version: str
    python: str
    torch: str
    rank: int
    on: bool
    why: str
    obstacle: str | None
    waiting: bool
    zero_copy: bool
    reduction: str | None
    trims: dict[str, bool]
    patched: tuple[Patched, ...]
    releases: str
    variables: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """The same as plain dictionaries and lists, for `json.dumps`."""
        patched = [{**asdict(point), "others": list(point.others)} for point in self.patched]
        return {**vars(self), "patched": patched}

    def __str__(self) -> str:
        state = f"on: {self.why}" if self.on else f"off: {self.why}"
        if self.obstacle is not None:
            state = f"wanted ({self.why}), but off: {self.obstacle}"
        elif self.waiting:
            state += "; it waits for torch's FSDP2 to be imported"
        rows = [
            ["fsdp_skip1", f"{self.version}, {state}"],
            ["torch", f"{self.torch} (this version knows {self.releases})"],
            ["rank", str(self.rank)],
        ]
        for name, value in self.variables.items():
            rows.append(["variable", f"{name}={value}"])
        if self.reduction is not None:
            off = [name for name, on in self.trims.items() if not on]
            rows += [
                ["zero copy", "yes" if self.zero_copy else "no: private copies"],
                ["reduction", self.reduction],
                ["trims", "all on" if not off else f"off: {', '.join(off)}"],
            ]
        for number, point in enumerate(self.patched):
            target = point.target.removeprefix(f"{activation.FSDP2}.")
            text = target if point.holds else f"{target} NO LONGER HOLDS"
            if point.others:
                by = "wrapped by" if point.holds else "replaced by"
                text += f" ({by} {', '.join(point.others)})"
            rows.append(["" if number else "patched", text])
        return "\n".join(_aligned(rows))

    __repr__ = __str__


def _why() -> str:
    wanted = activation.decision()
    return _CAUSES[wanted.on, wanted.cause]


def _obstacle(loaded: bool) -> str:
    if not loaded:
        return f"this torch has no {activation.FSDP2}, where FSDP2 lives from 2.6 on"
    try:
        from fsdp_skip1 import patch
        from fsdp_skip1.releases import NotUnderstood

        try:
            patch.look()
        except NotUnderstood as error:
            return f"this torch is not understood: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "switching it on failed, with a warning"


def _reduction_of(fsdp2: Fsdp2 | None) -> str | None:
    if fsdp2 is None:
        return None
    return "patched" if fsdp2.reduce is not None else f"left to torch: {fsdp2.reduce_reason}"


def _patched(point: PatchPoint) -> Patched:
    from fsdp_skip1.others import describe

    owner = point.owner
    target = f"{owner.__name__}.{point.name}"
    if isinstance(owner, type):
        target = f"{owner.__module__}.{target}"
    holds = point.holds()
    others = _others(point) if holds else (describe(point.current),)
    return Patched(target, holds, others)


def _others(point: PatchPoint) -> tuple[str, ...]:
    """Who has wrapped the attribute after us, and before us."""
    from fsdp_skip1.others import describe, is_torchs, leads_to_torch, reaches, walk

    found: dict[str, None] = {}
    for function in walk(point.current, point.owner):
        if function is point.installed:
            break
        if not is_torchs(function) and reaches(function, point.installed, point.owner):
            found[describe(function)] = None
    before = point.bypassed()
    for function in () if before is None else walk(before, point.owner):
        if is_torchs(function):
            break
        if leads_to_torch(function, point.name, point.owner) is not None:
            found[describe(function)] = None
    return tuple(found)


def _torch_release() -> str:
    torch = sys.modules.get("torch")
    return "not imported" if torch is None else str(getattr(torch, "__version__", "unknown"))


# --- stats ------------------------------------------------------------------------------------


def stats() -> Stats:
    """Say what was skipped in this process since the plugin was switched on.

    Returns:
        A `Stats`: `print` it, or take its `to_dict()`.
    """
    return Stats(**counters.as_dict())


@dataclass(frozen=True)
class Stats:
    """What was skipped in this process since the plugin was switched on.

    Attributes:
        all_gathers: Unshards that issued no all-gather.
        all_gather_bytes: Bytes of the parameters in them.
        reduce_scatters: Reductions that issued no reduce-scatter.
        reduce_scatter_bytes: Bytes of the gradients in them.
        shared: Parameters unsharded without a copy.
        copied: Parameters unsharded by one copy, cast or transfer.
    """

    all_gathers: int
    all_gather_bytes: int
    reduce_scatters: int
    reduce_scatter_bytes: int
    shared: int
    copied: int

    def to_dict(self) -> dict[str, int]:
        """The same as a plain dictionary."""
        return dict(vars(self))

    def __str__(self) -> str:
        return (
            f"skipped {_plural(self.all_gathers, 'all-gather')} "
            f"({_size(self.all_gather_bytes)} of parameters: {self.shared} unsharded with no copy, "
            f"{self.copied} with one) and {_plural(self.reduce_scatters, 'reduce-scatter')} "
            f"({_size(self.reduce_scatter_bytes)} of gradients)"
        )


# --- text -------------------------------------------------------------------------------------


def _aligned(rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> list[str]:
    """Lines of text in which the cells of a column stand below one another."""
    widths = [len(part) for part in _columns(rows)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """The longest cell of each column."""
    return [max(column, key=len) for column in zip(*rows)]


def _size(number: int) -> str:
    size = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            break
        size /= 1024
    else:
        unit = "TiB"
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def _plural(number: int, word: str) -> str:
    ending = "" if number == 1 else "es" if word.endswith("ch") else "s"
    return f"{number} {word}{ending}"


def _some(names: Sequence[str]) -> str:
    shown = [name or "(model)" for name in names[:3]]
    if len(names) > 3:
        shown.append(f"and {len(names) - 3} more")
    return ", ".join(shown)
