"""What the plugin does, for people and for programs: `explain`, `status` and `stats`.

This room only reads, and imports no torch.
"""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import fsdp_skip1
from fsdp_skip1 import activation, notices
from fsdp_skip1.counters import counters
from fsdp_skip1.explanation import Explanation, explain, torch_release, why
from fsdp_skip1.text import aligned, plural, size

if TYPE_CHECKING:
    from fsdp_skip1.points import PatchPoint
    from fsdp_skip1.releases import Fsdp2

__all__ = ["Explanation", "Patched", "Stats", "Status", "explain", "stats", "status"]

RELEASES = "2.6 to 2.15"
VARIABLES = (
    "FSDP_SKIP1",
    "FSDP_SKIP1_LOG",
    "FSDP_SKIP1_TRIMS",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
)


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
    return Status(
        version=fsdp_skip1.__version__,
        python=platform.python_version(),
        torch=torch_release(),
        rank=notices.rank(),
        on=on,
        why=why(),
        obstacle=obstacle,
        waiting=on and not loaded,
        zero_copy=wanted.zero_copy,
        reduction=_reduction_of(fsdp2),
        trims=_trims() if fsdp2 is not None else {},
        patched=tuple(_patched(p) for p in patch.points()) if patch is not None else (),
        releases=RELEASES,
        variables={name: os.environ[name] for name in VARIABLES if name in os.environ},
    )


def _trims() -> dict[str, bool]:
    from fsdp_skip1 import patch, trims

    found = {name: name in trims.chosen() for name in trims.REASONS}
    found["steady"] = patch.steps_in_one_piece()
    return found


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
        return "\n".join(aligned(rows))

    __repr__ = __str__


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
            f"skipped {plural(self.all_gathers, 'all-gather')} "
            f"({size(self.all_gather_bytes)} of parameters: {self.shared} unsharded with no copy, "
            f"{self.copied} with one) and {plural(self.reduce_scatters, 'reduce-scatter')} "
            f"({size(self.reduce_scatter_bytes)} of gradients)"
        )
