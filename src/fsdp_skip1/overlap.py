"""All-reduces that run while the rest of backward computes, on a device without streams.

[Note: overlap on the CPU]
On CUDA an all-reduce overlaps by being on a stream of its own. On the CPU ``dist.all_reduce``
blocks, so it is issued asynchronously, and what follows it (division, cast, accumulation) waits
until the end of this backward. The autograd engine runs the callback that finishes it after
FSDP2's own last callback, and so after the last reduction.

If backward raises, the engine drops its callbacks without running them; the same work is then
done as the dropped callback is freed, before the caller sees the exception. So nothing is ever
in flight between two backwards, and the gradients are those of the synchronous way.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Variable

if TYPE_CHECKING:
    from collections.abc import Callable

_thread = threading.local()
_live: weakref.WeakSet[InFlight] = weakref.WeakSet()


class InFlight:
    """The all-reduces of one backward, in the order in which they were issued."""

    def __init__(self) -> None:
        self._entries: list[tuple[Any, Callable[[], None]]] = []
        self._params: set[int] = set()

    def add(self, work: Any, finish: Callable[[], None], fsdp_params: list[Any]) -> None:
        self._entries.append((work, finish))
        self._params.update(map(id, fsdp_params))

    def concerns(self, fsdp_params: list[Any]) -> bool:
        return not self._params.isdisjoint(map(id, fsdp_params))

    def drain(self) -> None:
        """Wait for every all-reduce and do what follows it."""
        entries, self._entries = self._entries, []
        self._params.clear()
        with torch.no_grad():
            for work, finish in entries:
                work.wait()
                finish()

    def __del__(self) -> None:
        if self._entries:
            self.drain()


def possible(device: torch.device) -> bool:
    """Whether an all-reduce may stay in flight: on the CPU, in a backward of the engine."""
    return device.type == "cpu" and bool(torch._C._current_graph_task_id() != -1)


def current() -> InFlight:
    """The collection of the backward that runs in this thread; the engine owns it."""
    reference = getattr(_thread, "reference", None)
    in_flight = None if reference is None else reference()
    task = torch._C._current_graph_task_id()
    if in_flight is None or getattr(_thread, "task", None) != task:
        if in_flight is not None:  # a backward inside a backward (reentrant checkpointing)
            in_flight.drain()
        in_flight = InFlight()
        _live.add(in_flight)
        # Only the engine keeps it alive: see [Note: overlap on the CPU] on exceptions.
        _thread.reference = weakref.ref(in_flight)
        _thread.task = task
        Variable._execution_engine.queue_callback(in_flight.drain)
    return in_flight


def finish_before(fsdp_params: list[Any]) -> None:
    """Let earlier all-reduces of the same parameters finish: what follows adds to them."""
    for in_flight in list(_live):
        if in_flight.concerns(fsdp_params):
            in_flight.drain()


def finish_all() -> None:
    """Let every all-reduce of this process finish."""
    for in_flight in list(_live):
        in_flight.drain()
