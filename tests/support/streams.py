"""A device with streams that is none: CPU tensors, and a record of every stream and event.

While a ``Device`` is entered, FSDP2 believes that it runs on CUDA. The tensors stay on the CPU,
where everything happens at once and in the order of the calls. What a real device could do in
another order is worked out instead: PyTorch's own stream sanitizer hears of every kernel with the
memory that it reads and writes, of every event recorded and waited for, and reports whatever two
streams do to the same memory with no order between them.

Three things go beyond what the sanitizer does on a GPU.

*Memory is reused as early as the caching allocator may.* A freed block goes to the next allocation
on the stream that it was allocated on, and takes the history of its accesses along. On a GPU the
sanitizer forgets a block's history when it is freed, and reuse is up to chance.

*The host is a stream.* What it queues comes after what it did and waited for, so that host
memory which is read or written while a copy is still in flight is a race like any other.

*Faults can be planted.* A wait can be left out (``deaf``) and an event can be recorded before the
work that it stands for (``early``), at any line of the plugin. Copies to the host can all be made
without waiting for them (``hasty``), and streams can take each other's memory (``one_pool``).
"""

import contextlib
import itertools
import linecache
import sys
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FSDPModule
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp_skip1 import plan
from support.arms import param_groups

LABEL = torch.device("cuda", 0)
HOST = -1

COMPUTE, TO_DEVICE, TO_HOST, COLLECTIVE, ON_HOST = (
    "compute",
    "to device",
    "to host",
    "collective",
    "on host",
)
_STILL = frozenset(
    {
        "aten::empty",
        "aten::empty_like",
        "aten::empty_strided",
        "aten::new_empty",
        "aten::new_empty_strided",
        "aten::is_pinned",
        "aten::set_",
        "aten::resize_",
    }
)
_COPIES = frozenset({"aten::copy_", "aten::_foreach_copy_"})


@dataclass(frozen=True)
class Kernel:
    """One piece of work, and what came before it by the order of streams.

    ``reads`` and ``writes`` are storages: an unsharded parameter keeps its storage object for life,
    whatever memory is behind it.
    """

    seq: int
    name: str
    kind: str
    stream: int
    reads: frozenset[int]
    writes: frozenset[int]
    clock: dict[int, int] = field(repr=False)

    def touches(self, storages: set[int]) -> bool:
        return not storages.isdisjoint(self.reads | self.writes)

    def is_before(self, other: "Kernel") -> bool:
        """Whether ``other`` cannot start until this has ended."""
        return other.clock.get(self.stream, -1) >= self.seq


class Stream:
    """Stands in for ``torch.cuda.Stream``."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = Device.entered()
        self.stream_id = self.device.new_stream()

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: "Event") -> None:
        self.device.wait(self.stream_id, event.event_id)

    def wait_stream(self, stream: "Stream") -> None:
        event = Event()
        self.device.record(event.event_id, stream.stream_id, may_be_early=False)
        self.wait_event(event)

    def synchronize(self) -> None:
        self.device.wait_on_host(self.stream_id)

    def query(self) -> bool:
        return True


class Event:
    """Stands in for ``torch.cuda.Event``."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = Device.entered()
        self.event_id = self.device.new_event()

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.device.current
        self.device.record(self.event_id, stream.stream_id)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.device.current).wait_event(self)

    def synchronize(self) -> None:
        self.device.wait(HOST, self.event_id)

    def query(self) -> bool:
        return True


@dataclass
class Block:
    """A piece of the device's memory, or of the host's; what races are about."""

    number: int
    nbytes: int
    stream: int
    on_host: bool = False
    pinned: bool = False
    shared_with: set[int] = field(default_factory=set)  # streams named by ``record_stream``


class Device:
    """The stand-in; enter it around everything that FSDP2 does, ``fully_shard`` included."""

    _entered: "Device | None" = None

    def __init__(
        self,
        *,
        deaf: str | None = None,
        early: str | None = None,
        hasty: bool = False,
        one_pool: bool = False,
    ) -> None:
        # Importing it makes an instance of the sanitizer, which the tests of others can do without.
        from torch.cuda import _sanitizer

        self._sanitizer = _sanitizer
        self._handler = _sanitizer.EventHandler()
        self.deaf, self.early, self.hasty, self.one_pool = deaf, early, hasty, one_pool
        self.races: list[str] = []
        self.kernels: list[Kernel] = []
        self.sites: dict[str, Counter[str]] = {"wait": Counter(), "record": Counter()}
        self.host_waits: Counter[str] = Counter()
        self.live = self.peak = 0  # bytes of the device's memory
        self.live_of: Counter[int] = Counter()  # the same by stream of allocation
        self.peak_of: Counter[int] = Counter()
        self._streams = itertools.count(1)
        self._events = itertools.count(1)
        self._numbers = itertools.count(1)
        self._blocks: dict[int, Block] = {}  # by storage
        self._owners: dict[int, StorageWeakRef] = {}
        self._free: dict[int, list[Block]] = defaultdict(list)  # by stream
        self._handler._handle_stream_creation(HOST)
        self._host_event = self.new_event()

    @staticmethod
    def entered() -> "Device":
        assert Device._entered is not None, "no stand-in device here"
        return Device._entered

    def __enter__(self):
        assert Device._entered is None
        Device._entered = self
        self.default = Stream.__new__(Stream)
        self.default.device, self.default.stream_id = self, 0
        self.current = self.default
        self._stack = contextlib.ExitStack()
        for owner, name, value in self._patches():
            self._stack.enter_context(mock.patch.object(owner, name, value))
        self._stack.enter_context(_Kernels(self))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        Device._entered = None

    def _patches(self) -> Iterator[tuple[Any, str, Any]]:
        """Where FSDP2 and the plugin ask a device for streams; where FSDP2 frees memory."""
        for module in (torch.cuda, torch.cpu):  # some ask for the device of a tensor
            yield module, "Stream", Stream
            yield module, "Event", Event
            yield module, "current_stream", lambda device=None: self.current
            yield module, "stream", self.on
        yield torch.accelerator, "current_stream", lambda device=None: self.current
        yield torch.UntypedStorage, "resize_", self._resizing(torch.UntypedStorage.resize_)
        for name in ("empty", "zeros", "ones"):
            yield torch, name, _without_label(getattr(torch, name))
        for name, method in {
            "to": self._to(torch.Tensor.to),
            "cpu": lambda tensor: self.moved(tensor, to_host=True),
            "pin_memory": lambda tensor, **_: self._pin(tensor),
            "is_pinned": lambda tensor, **_: all(self.block(t).pinned for t in _inside(tensor)),
            "record_stream": lambda tensor, stream: self._record_stream(tensor, stream),
        }.items():
            yield torch.Tensor, name, method
        yield self._sanitizer, "traceback", _Traceback
        # Both sides are on the CPU, so that the plugin has to be told which parameters are not.
        yield plan, "offloaded", lambda fsdp_param: fsdp_param.offload_to_cpu

    def take(self, module: torch.nn.Module) -> None:
        """Let FSDP2 believe that this module, just sharded, lives here."""
        for submodule in module.modules():
            if isinstance(submodule, FSDPModule):
                state = submodule._get_fsdp_state()
                state._device, state._device_handle = LABEL, torch.cuda
        for group in param_groups(module):
            group.device, group.device_handle = LABEL, torch.cuda
            for fsdp_param in group.fsdp_params:
                fsdp_param.device = LABEL

    # -- streams and events ----------------------------------------------------------------------

    @contextlib.contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        before = self.current
        self.current = stream or before
        try:
            yield
        finally:
            self.current = before

    def new_stream(self) -> int:
        number = next(self._streams)
        self._handler._handle_stream_creation(number)
        return number

    def new_event(self) -> int:
        number = next(self._events)
        self._handler._handle_event_creation(number)
        return number

    def record(self, event: int, stream: int, may_be_early: bool = True) -> None:
        self._follow_host(stream)
        site = _site()
        if site and may_be_early:
            self.sites["record"][site] += 1
            if site == self.early:
                return  # as if nothing had been queued yet
        self._handler._handle_event_record(event, stream)

    def wait(self, stream: int, event: int) -> None:
        site = _site()
        if site:
            self.sites["wait"][site] += 1
            if site == self.deaf:
                return
        if stream == HOST:
            self.host_waits[site or "torch"] += 1
        self._handler._handle_event_wait(event, stream)

    def wait_on_host(self, stream: int) -> None:
        """The host blocks until a stream is done."""
        self.host_waits[_site() or "torch"] += 1
        event = self.new_event()
        self._handler._handle_event_record(event, stream)
        self._handler._handle_event_wait(event, HOST)

    def _follow_host(self, stream: int) -> None:
        """What is queued now comes after what the host has done and waited for."""
        self._handler._handle_event_record(self._host_event, HOST)
        self._handler._handle_event_wait(self._host_event, stream)

    # -- memory ----------------------------------------------------------------------------------

    def block(self, tensor: torch.Tensor) -> Block:
        """The memory behind a tensor; allocated now, if it was not known yet."""
        storage = tensor.untyped_storage()
        block = self._blocks.get(storage._cdata)
        if block is None:
            self._sweep()
            block = self._allocate(storage.nbytes())
            self._blocks[storage._cdata] = block
            self._owners[storage._cdata] = StorageWeakRef(storage)
        return block

    def to_host_memory(self, tensor: torch.Tensor, pinned: bool) -> torch.Tensor:
        """Declare that a tensor was on the host all along."""
        block = self.block(tensor)
        if not block.on_host:
            self._release(block)
            key = tensor.untyped_storage()._cdata
            self._blocks[key] = block = Block(next(self._numbers), block.nbytes, HOST, on_host=True)
        block.pinned = pinned
        return tensor

    def _allocate(self, nbytes: int) -> Block:
        stream = 0 if self.one_pool else self.current.stream_id
        free = self._free[stream]
        self.live += nbytes
        self.live_of[stream] += nbytes
        self.peak = max(self.peak, self.live)
        self.peak_of[stream] = max(self.peak_of[stream], self.live_of[stream])
        for index in reversed(range(len(free))):
            if free[index].nbytes >= nbytes > 0:
                block = free.pop(index)
                return Block(block.number, nbytes, stream)
        return Block(next(self._numbers), nbytes, stream)

    def _release(self, block: Block) -> None:
        if block.on_host:
            return  # the allocator of pinned memory waits for copies in flight
        self.live -= block.nbytes
        self.live_of[block.stream] -= block.nbytes
        if not block.shared_with - {block.stream}:  # else only once those streams are done
            self._free[block.stream].append(block)

    def _sweep(self) -> None:
        """Storages that nobody holds any more gave their memory back."""
        gone = [key for key, owner in self._owners.items() if owner.expired()]
        for key in gone:
            del self._owners[key]
            self._release(self._blocks.pop(key))

    def collect(self) -> int:
        """Bytes of the device's memory that are in use now."""
        self._sweep()
        return self.live

    def _resizing(self, resize: Callable[..., Any]) -> Callable[..., Any]:
        def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
            known = self._blocks.pop(storage._cdata, None)
            if known is not None:
                self._release(known)
            result = resize(storage, nbytes)
            self._sweep()
            self._blocks[storage._cdata] = self._allocate(nbytes)
            self._owners.setdefault(storage._cdata, StorageWeakRef(storage))
            return result

        return resize_

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        for inner in _inside(tensor):
            self.to_host_memory(inner, pinned=True)
        return tensor

    def _record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        self.block(tensor).shared_with.add(stream.stream_id)

    def _to(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            wanted = [a for a in (*args, kwargs.pop("device", None)) if _is_device(a)]
            args = tuple(a for a in args if not _is_device(a))
            if wanted:
                on_host = torch.device(wanted[0]).type == "cpu"
                tensor = self.moved(tensor, on_host, kwargs.pop("non_blocking", False))
            return original(tensor, *args, **kwargs) if args or kwargs else tensor

        return to

    def moved(
        self, tensor: torch.Tensor, to_host: bool, non_blocking: bool = False
    ) -> torch.Tensor:
        """``tensor.to(device)``, between two memories that are one."""
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            names, context = tensor.__tensor_flatten__()
            inner = {n: self.moved(getattr(tensor, n), to_host, non_blocking) for n in names}
            outer = (tensor.size(), tensor.stride())
            return type(tensor).__tensor_unflatten__(inner, context, *outer)
        if self.block(tensor).on_host == to_host:
            return tensor
        non_blocking |= self.hasty and to_host
        target = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
        if to_host:
            self.to_host_memory(target, pinned=non_blocking)
        return target.copy_(tensor, non_blocking=non_blocking)

    # -- kernels ---------------------------------------------------------------------------------

    def launched(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        if getattr(operator, "is_view", False):
            return
        reads, writes = self._accesses(operator._schema, args, kwargs, result)
        if not reads and not writes:
            return
        blocks = {key: self._blocks[key] for key in reads | writes}
        on_host = [block for block in blocks.values() if block.on_host]
        name, stream = operator._schema.name, self.current.stream_id
        if len(on_host) == len(blocks):
            kind, stream = ON_HOST, HOST
        elif on_host and name in _COPIES:
            kind = TO_HOST if any(blocks[key].on_host for key in writes) else TO_DEVICE
        else:
            assert not on_host, f"{name} of the device's memory and the host's"
            kind = COLLECTIVE if name.startswith("c10d::") else COMPUTE
        if stream != HOST:
            self._follow_host(stream)
        written = {blocks[key].number for key in writes}
        read = {blocks[key].number for key in reads} - written
        errors = self._handler._handle_kernel_launch(
            stream, read, written, set(), f"{name} ({kind})", {b: [] for b in read | written}
        )
        self.races += map(_describe, errors)
        seq = self._handler.seq_num
        clock = dict(self._handler.syncs.current_sync_states[stream])
        self.kernels.append(Kernel(seq, name, kind, stream, reads, writes, clock))
        blocking = kind in (TO_HOST, TO_DEVICE) and not (
            kwargs.get("non_blocking", False) or (len(args) > 2 and args[2])
        )
        if blocking or any(not block.pinned for block in on_host if stream != HOST):
            self.wait_on_host(stream)
        if name == "aten::_local_scalar_dense" and stream != HOST:
            self.wait_on_host(stream)

    def _accesses(
        self, schema: Any, args: Any, kwargs: Any, result: Any
    ) -> tuple[frozenset[int], frozenset[int]]:
        reads, writes, inputs = set(), set(), set()
        for argument, value in self._sanitizer.zip_arguments(schema, args, kwargs):
            keys = self._storages(value)
            inputs |= keys
            if argument.alias_info is not None:
                writes |= keys if argument.alias_info.is_write else set()
            elif not schema.name.startswith("c10d::"):
                reads |= keys
            elif "input" not in argument.name:  # in place, though the schema does not say so
                writes |= keys
        results = result if len(schema.returns) > 1 else (result,)
        for returned, value in zip(schema.returns, results):
            keys = self._storages(value, on_host=self._all_on_host(inputs))
            if returned.alias_info is None and not schema.name.startswith("c10d::"):
                writes |= keys - inputs
                if keys & inputs:  # a view that does not say so
                    reads.clear()
        if schema.name in _STILL:
            return frozenset(), frozenset()
        return frozenset(reads), frozenset(writes)

    def _all_on_host(self, keys: set[int]) -> bool:
        return bool(keys) and all(self._blocks[key].on_host for key in keys)

    def _storages(self, value: Any, on_host: bool = False) -> set[int]:
        """The storages in the arguments or the results of an operator."""
        tensors = [t for t in tree_leaves(value) if isinstance(t, torch.Tensor) and t.numel()]
        keys = {tensor.untyped_storage()._cdata for tensor in tensors}
        for tensor in tensors:
            if on_host and tensor.untyped_storage()._cdata not in self._blocks:
                self.to_host_memory(tensor, pinned=False)
            self.block(tensor)
        return keys


class _Kernels(TorchDispatchMode):
    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(issubclass(t, FakeTensor) for t in types):
            return func(*args, **kwargs)
        if any(t not in (torch.Tensor, torch.nn.Parameter) for t in types):
            return NotImplemented  # it unwraps itself first
        result = func(*args, **kwargs)
        if not (isinstance(result, FakeTensor) or torch._C._meta_in_tls_dispatch_include()):
            self.device.launched(func, args, kwargs, result)
        return result


def _inside(tensor: torch.Tensor) -> list[torch.Tensor]:
    """A tensor, or the tensors of which a subclass is made."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return [tensor]
    return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]


def _is_device(value: Any) -> bool:
    return isinstance(value, (str, torch.device))


def _without_label(factory: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps the name of the device from reaching torch."""

    def make(*args: Any, **kwargs: Any) -> Any:
        if _is_device(kwargs.get("device")) and torch.device(kwargs["device"]).type == LABEL.type:
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return make


def _site() -> str:
    """The line of the plugin that is running, or nothing if torch acts by itself."""
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        path = Path(code.co_filename)
        if path.parent.name == "fsdp_skip1" and not code.co_name.startswith("_record"):
            line = linecache.getline(code.co_filename, frame.f_lineno).strip()
            return f"{path.name}: {line}"
        if "_fully_shard" in path.parts:
            return ""
        frame = frame.f_back
    return ""


class _Traceback:
    """For the sanitizer: the few lines that say where a kernel came from, at a fraction of the cost."""

    class StackSummary:
        @staticmethod
        def extract(frames: Any, lookup_lines: bool) -> list[str]:
            paths = ((frame.f_code.co_filename, line) for frame, line in frames)
            return [f"{Path(p).name}:{n}" for p, n in paths if "fsdp" in p or "test_" in p]

    walk_stack = staticmethod(traceback.walk_stack)


def _describe(error: Any) -> str:
    sides = []
    for access in (error.current_access, error.previous_access):
        where = " < ".join(reversed(access.stack_trace[-3:]))
        sides.append(f"{access.operator} {access.type} it on stream {access.stream} at {where}")
    return f"block {error.data_ptr}: {sides[0]}, while {sides[1]}"
