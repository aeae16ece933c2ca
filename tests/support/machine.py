"""Drives the three arms of the state machine, each in a process of its own, and judges them.

Plain, stock and plugin get the same operations. The plugin has to equal stock to the bit; where
stock is known to be wrong, it has to equal the plain module from there on.

[Note: exemptions]
All of them, each with the place where it is made:

*Stock is wrong, plain takes over.* Divide factors and ``.to(dtype)`` after a first forward
(``_allows``); a gradient that arrives late (``_known_fault``). Inference mode before training: the
stock arm makes its unsharded parameters before (``Arm._make_unsharded_parameters``).

*Stock is wrong, and too confused to go on.* It frees a parameter that a graph or a copy still needs,
where the plugin has nothing to free, after a forward through a part of a group: plain says whether
the plugin was right, and the model ends (``_freed_too_early``). A sharded parameter gets lost by ``.to`` after
an exception in forward (``_loses_itself``); the process dies of reading freed memory (``_ask``).

*Both are alike.* FSDP2 refuses the model at its first forward, and leaves it half-made
(``_never_ready``).

*The plugin does as plain does.* A graph from before ``load_state_dict(assign=True)``, ``.to`` or
another swap of storages computes with the values that forward saw, in stock with those of now:
such graphs are dropped before parameters change (``_changes_what_graphs_lost``).

*The README says that they differ.* Parameters that change while they are unsharded: the model
is resharded before (``_clear_the_way``), and no hook steps parameters that stay unsharded after
backward (``_allows``). A user's own memory for an unsharded parameter: compared until the next
unshard, when stock keeps it for good and the plugin goes back to the sharded parameter
(``point_elsewhere`` in ``do``).

*FSDP2 does not take it.* Stock and plugin raise alike where plain is the measure (``_compare``); a
block before the root's first forward, and no unshard in backward
where backward needs the weight (``_allows``).

[Note: what plain can say]
The plain module follows as long as it can: no optimizer step between forward and backward, no
exception in backward, no rounding of FSDP2's own. The first time it differs from a stock that is
right, it no longer counts.
"""

import contextlib
import dataclasses
import faulthandler
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from typing import Any

import torch.distributed as dist

from support import standins, warmup
from support.arms import PLAIN, PLUGIN, STOCK
from support.faults import fault
from support.features import RELEASE
from support.machine_arm import Arm, Op, Report, Spec

# An operation takes milliseconds. Only a deadlock takes this long, however slow the computer is.
_TIMEOUT_SECONDS = 300.0
_KINDS = (PLAIN, STOCK, PLUGIN)


class Divergence(AssertionError):
    """The arms differ, or an invariant is broken; the message holds what replays it."""


class Gone(Exception):
    """An arm died, hung, or failed outside of an operation."""

    def __init__(self, kind: str, how: str, *, died: bool = False) -> None:
        super().__init__(f"the arm {kind} {how}")
        self.kind, self.died = kind, died


class Child:
    """One arm in a forked process."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.output = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        self.pipe, other = multiprocessing.connection.Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self.pipe.close()
            _serve(kind, other, self.output.fileno())  # never returns
        other.close()

    def send(self, request: Spec | Op) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.pipe.send(request)

    def receive(self) -> Report:
        died = True
        with contextlib.suppress(EOFError, ConnectionResetError):
            if self.pipe.poll(_TIMEOUT_SECONDS):
                answer = self.pipe.recv()
                if isinstance(answer, Report):
                    return answer
                raise Gone(self.kind, f"failed itself:\n{answer}")
            died = False
            os.kill(self.pid, signal.SIGUSR1)
            time.sleep(0.3)
        how = "died" if died else f"hung for {_TIMEOUT_SECONDS:g} s"
        self.output.seek(0)
        said = self.output.read().decode(errors="replace")[-3000:]
        raise Gone(self.kind, f"{how}:\n{said}", died=died)

    def close(self) -> None:
        self.pipe.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        self.output.close()


def _serve(kind: str, pipe: Any, output: int) -> None:
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        faulthandler.enable(file=sys.stderr, all_threads=True)
        faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
        warnings.simplefilter("ignore")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            arm = Arm(kind)
            while True:
                request = pipe.recv()
                pipe.send(arm.begin(request) if isinstance(request, Spec) else arm.do(request))
        except EOFError:
            pass
        except BaseException:
            pipe.send(traceback.format_exc())
    finally:
        os._exit(0)


class Trio:
    """The three processes; restarted after a failure, so that every replay begins afresh."""

    def __init__(self) -> None:
        warmup.load()
        standins.install_copy_out()
        standins.install_events()
        standins.install_average()
        self._children: list[Child] = []

    def ask(self, request: Spec | Op) -> dict[str, Report]:
        if not self._children:
            assert isinstance(request, Spec)
            self._children = [Child(kind) for kind in _KINDS]
        for child in self._children:
            child.send(request)
        return {child.kind: child.receive() for child in self._children}

    def close(self) -> None:
        for child in self._children:
            child.close()
        self._children = []


# Operations after which plain can still say what is right, where stock cannot.
_PLAIN_FOLLOWS = frozenset(
    [
        "forward",
        "backward",
        "repeat",
        "drop",
        "step",
        "zero_grad",
        "scale_grads",
        "let_go",
        "freeze",
        "write",
        "unshard",
        "wait",
        "reshard",
        "prefetch",
        "setter",
        "divide_factor",
        "state_dict",
        "load",
        "swap",
        "to",
        "toggle",
        "reset_iter_state",
        "evaluate",
        "duplicate",
    ]
)
# Operations that change parameters: plain must not make them between forward and backward.
_CHANGES = frozenset(["step", "write", "load", "duplicate", "swap", "to", "freeze"])
# What may follow ``point_elsewhere``, see [Note: exemptions].
_LEAVE_ELSEWHERE = frozenset(["toggle", "point_elsewhere", "state_dict", "reshard"])
# Before 2.9 stock copies when an unshard is begun, not when it is waited for.
_COPIES_AT_UNSHARD = RELEASE < (2, 9)


def plain_can_follow(spec: Spec) -> bool:
    """Whether the plain module rounds as FSDP2 does: see [Note: what plain can say]."""
    if not spec.param_dtype:
        return spec.reduce_dtype in ("", spec.dtype) and not spec.output_dtype
    dtypes = (spec.dtype, spec.param_dtype, spec.reduce_dtype)
    return dtypes == ("float32", "bfloat16", "float32") and not spec.checkpoint


class Judge:
    """One model: carries operations out in all arms and compares what they left.

    Args:
        trio: the three arms.
        steps: counts how often each operation ran. In parentheses, so that they are no
            operations: how often the arms agreed to raise, and how often plain was the measure.
    """

    def __init__(self, trio: Trio, steps: Counter[str] | None = None) -> None:
        self._trio = trio
        self.steps: Counter[str] = Counter() if steps is None else steps

    def begin(self, spec: Spec) -> None:
        self.spec = spec
        self.history: list[Op] = []
        self.stock_counts = True
        self.plain_counts = plain_can_follow(spec)
        self.over = False  # nothing is left to compare with
        self.failed = False
        #: Of the parameters: all of them, but for the odd one.
        self.dtypes = {spec.dtype, *(["float16"] if spec.odd == "half" else [])}
        self.used = False  # after the first forward or unshard
        self.rooted = False  # after the first forward of the root
        self.factor, self.forced = 1.0, False
        self.steps_in_backward = False
        self.keeps_after_backward = False
        self.entry_stays_sharded = False
        self.shared_graphs = False  # pending, and may look at memory that is shared
        self.lost_graphs = False  # and at memory that no parameter has any more
        self.elsewhere = False  # a parameter has memory of the user's
        self._settle()
        reports = self._ask(spec)
        if reports:
            self._compare(reports, "begin")

    def do(self, operation: Op) -> None:
        """Carries it out in all arms, unless they could not be compared any more."""
        for each in self._spelled_out(operation):
            if self.elsewhere and each.name not in _LEAVE_ELSEWHERE:
                self.over = True
            if not self.over and self._allows(each) and self._clear_the_way(each):
                self._carry_out(each)

    def play(self, spec: Spec, *operations: Op) -> None:
        self.begin(spec)
        for operation in operations:
            self.do(operation)

    def _carry_out(self, operation: Op) -> None:
        self.history.append(operation)
        self.steps[operation.name] += 1
        self._follow(operation)
        shared_before = self.last[PLUGIN].facts["may_share"]
        reports = self._ask(operation)
        if reports:
            self._watch_graphs(shared_before)
            self._compare(reports, operation.name)

    def _ask(self, request: Spec | Op) -> dict[str, Report]:
        try:
            self.last = self._trio.ask(request)
        except Gone as gone:
            self._trio.close()
            if gone.kind != STOCK or not gone.died:
                self._fail([str(gone)])
            # Stock reads memory that it has freed after some exceptions; there is nothing to learn.
            self.steps["(stock died)"] += 1
            self.over = True
            return {}
        return self.last

    # - What may be compared

    @staticmethod
    def _spelled_out(operation: Op) -> list[Op]:
        """A whole step, with or without microbatches, is one operation to write and many to do."""
        if operation.name != "train":
            return [operation]
        arguments = dict(operation.arguments)
        micro, seed = arguments.pop("micro", 1), arguments.pop("seed", 0)
        passes = [
            each
            for index in range(micro)
            for each in (
                Op("forward", {**arguments, "seed": seed + index}),
                Op("backward", {"which": -1}),
            )
        ]
        return [*passes, Op("step", {}), Op("zero_grad", {})]

    def _allows(self, operation: Op) -> bool:
        name, arguments = operation.name, operation.arguments
        pending_graphs = self.last[PLAIN].facts["graphs"] or self.last[PLUGIN].facts["graphs"]
        if not self.stock_counts and (
            name not in _PLAIN_FOLLOWS
            or arguments.get("action") == "off"
            or (name in _CHANGES and pending_graphs)
            or (name == "setter" and arguments.get("where", -1) != -1)
        ):
            return False
        if name == "backward" and not pending_graphs:
            return False
        if name == "reset_iter_state" and not self.rooted:
            return False
        if name == "wait" and not self.last[PLUGIN].facts["handles"]:
            return False
        if name == "forward":
            if arguments.get("where", -1) >= 0 and (
                not self.rooted or self.spec.wrap == "root" or not self.stock_counts
            ):
                return False  # FSDP2 wants to see the root first
            return not (self.entry_stays_sharded and arguments.get("grad_input"))
        if name == "to":
            return not self._wrong_after_to(arguments["dtype"]) or self._plain_takes_over()
        if name == "divide_factor":
            wrong = self._divides_wrongly(arguments["factor"], self.forced)
            return not wrong or self._plain_takes_over()
        if name == "step_in_backward":
            return not self.keeps_after_backward
        if name == "setter":
            return self._allows_setter(**arguments)
        return True

    def _allows_setter(self, name: str, value: Any, where: int = -1) -> bool:
        if name == "set_force_sum_reduction_for_comms":
            return not self._divides_wrongly(self.factor, value) or self._plain_takes_over()
        if name == "set_reshard_after_backward" and not value:
            return not self.steps_in_backward
        if name == "set_unshard_in_backward":
            # Only where backward does not need the weight.
            graphs = self.last[PLUGIN].facts["graphs"]
            return where == -2 and self.spec.wrap == "entry" and not graphs
        return True

    def _plain_takes_over(self) -> bool:
        """Stock is about to be wrong, and so would be the plugin while it is off."""
        graphs = self.last[PLAIN].facts["graphs"] or self.last[PLUGIN].facts["graphs"]
        if not self.plain_counts or graphs or self.last[PLUGIN].facts["may_be_off"]:
            return False
        self.stock_counts = False
        return True

    def _wrong_after_to(self, dtype: str) -> bool:
        return self.used and {dtype} != self.dtypes

    def _divides_wrongly(self, factor: float, forced: bool) -> bool:
        if factor == 1.0:
            return False
        # Which dtype a reduction runs in depends on the release.
        dtypes = {self.spec.reduce_dtype, self.spec.param_dtype, *self.dtypes}
        twice = forced or "float16" in dtypes
        return fault("divide factor not applied") or (
            twice and fault("divide factor applied twice")
        )

    def _clear_the_way(self, operation: Op) -> bool:
        """Reshards before a parameter changes, and drops graphs that cannot see the change.

        Over shared memory, a change shows at once in a group that is unsharded, where stock goes
        on with its copy of the old values. That is documented, and not compared. Nor is backward
        through a graph whose parameters have been given other memory since.
        """
        if self._changes_what_graphs_lost(operation):
            self._carry_out(Op("drop", {}))
        if operation.name not in ("step", "write", "load", "duplicate"):
            return True
        if self._in_danger():
            self._carry_out(Op("reshard", {}))
        return not self.over and not self._in_danger()

    def _changes_what_graphs_lost(self, operation: Op) -> bool:
        name = operation.name
        assigns = bool(operation.arguments.get("assign"))
        if self.shared_graphs and (name in ("swap", "to") or assigns):
            self.lost_graphs = True
        changes = name in ("step", "write", "load", "duplicate", "to") or (
            name == "backward" and self.steps_in_backward
        )
        return self.lost_graphs and changes

    def _watch_graphs(self, shared_before: bool) -> None:
        facts = self.last[PLUGIN].facts
        pending = bool(facts["graphs"] or self.last[PLAIN].facts["graphs"])
        may_share = shared_before or facts["may_share"]
        self.shared_graphs = pending and (self.shared_graphs or may_share)
        self.lost_graphs = pending and self.lost_graphs

    def _in_danger(self) -> bool:
        facts = self.last[PLUGIN].facts
        early = facts["pending"] and _COPIES_AT_UNSHARD
        return bool(early or (facts["unsharded"] and facts["may_share"]))

    def _follow(self, operation: Op) -> None:
        name, arguments = operation.name, operation.arguments
        graphs = self.last[PLAIN].facts["graphs"]
        if name not in _PLAIN_FOLLOWS or (name in _CHANGES and graphs):
            self.plain_counts = False
        if name == "to":
            self.dtypes = {arguments["dtype"]}
            now = dataclasses.replace(self.spec, dtype=arguments["dtype"])
            self.plain_counts = self.plain_counts and plain_can_follow(now)
        elif name in ("forward", "unshard", "repeat"):
            self.used = True
            self.rooted = self.rooted or name != "unshard"
        elif name == "divide_factor":
            self.factor = arguments["factor"]
        elif name == "step_in_backward":
            self.steps_in_backward = True
        elif name == "point_elsewhere":
            self.elsewhere = True
        elif name == "setter":
            value = arguments["value"]
            if arguments["name"] == "set_force_sum_reduction_for_comms":
                self.forced = value
            elif arguments["name"] == "set_reshard_after_backward":
                self.keeps_after_backward = self.keeps_after_backward or not value
            elif arguments["name"] == "set_unshard_in_backward":
                self.entry_stays_sharded = self.entry_stays_sharded or not value
            elif arguments["name"] == "set_reduce_scatter_unused_params":
                self.plain_counts = False
        self._settle()

    def _settle(self) -> None:
        if not (self.stock_counts or self.plain_counts):
            self.over = True

    # - Comparing

    def _compare(self, reports: dict[str, Report], during: str) -> None:
        plain, stock, plugin = (reports[kind] for kind in _KINDS)
        if _loses_itself(stock.error) or _never_ready(stock, plugin):
            self.over = True
            return
        if not self.stock_counts and stock.error == plugin.error != "" and not plain.error:
            self.over = True
            return
        apart = self.stock_counts and plugin.error != stock.error
        confused = apart and _freed_too_early(stock.error)
        if confused or (apart and _known_fault(stock.error)):
            self.stock_counts = False
            self._settle()
            if self.over:
                return
        problems = [*plugin.broken, *(f"stock: {what}" for what in stock.broken)]
        if self.stock_counts:
            problems += _differences(plugin, stock, layout=True)
            if problems:
                problems = [f"{what} (instead of stock's)" for what in problems]
            elif _differences(stock, plain):
                self.plain_counts = False
            allowed = max(stock.facts["grown"], 0)
        else:
            problems += [f"{what} (instead of plain's)" for what in _differences(plugin, plain)]
            allowed = 0
        if plugin.facts["grown"] > allowed:
            problems.append(f"{plugin.facts['grown']} tensors more after the same steps")
        if problems:
            self._fail([f"{during}:", *problems[:12], plugin.trace])
        self.over = self.over or confused
        if plugin.error:
            self.steps["(raised)"] += 1
        if not self.stock_counts:
            self.steps["(plain)"] += 1

    def _fail(self, problems: list[str]) -> None:
        self._trio.close()
        self.failed = True
        what = ",\n    ".join(map(repr, [self.spec, *self.history]))
        raise Divergence("\n".join([*problems, "To replay:", f"judge.play(\n    {what},\n)"]))


def _loses_itself(error: str) -> bool:
    """Whether FSDP2 has mistaken an unsharded parameter for a sharded one, and kept it.

    ``.to`` does that where an exception in forward has left a group unsharded for good.
    """
    return "has no attribute '_local_tensor'" in error


def _never_ready(stock: Report, plugin: Report) -> bool:
    """Whether FSDP2 has refused the model at its first forward, in both arms alike."""
    return stock.error == plugin.error != "" and "in _lazy_init" in stock.trace


def _freed_too_early(error: str) -> bool:
    return "out of bounds for storage of size 0" in error or "invalid python storage" in error


def _known_fault(error: str) -> bool:
    return "uniform gradient dtype" in error and fault("gradient that arrives late")


def _differences(ours: Report, theirs: Report, layout: bool = False) -> list[str]:
    problems = []
    same = ours.error == theirs.error if layout else bool(ours.error) == bool(theirs.error)
    if not same:
        problems.append(
            f"raised {ours.error or 'nothing'}\n    instead of {theirs.error or 'nothing'}"
        )
    mine = {k: v for k, v in ours.records.items() if layout or _in_plain(k)}
    other = {k: v for k, v in theirs.records.items() if layout or _in_plain(k)}
    for key, image in mine.items():
        if key not in other:
            problems.append(f"{key}: not there in the other arm")
        elif image != other[key]:
            how = image.differs(other[key], layout)
            problems += [f"{key}: {how}"] if how else []
    problems += [f"{key}: only there in the other arm" for key in other if key not in mine]
    return problems


def _in_plain(key: str) -> bool:
    return key.startswith(("param ", "grad ", "output", "loss", "state "))
