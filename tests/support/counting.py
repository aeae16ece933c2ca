"""Counts what a step dispatches: operators by name, and which of them move data."""

import contextlib
from collections import Counter
from collections.abc import Iterator

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

# Names in the c10d namespaces, spelled without their namespace and trailing underscore.
ALL_GATHERS = frozenset(
    {
        "_allgather_base",
        "allgather",
        "allgather_coalesced",
        "allgather_into_tensor_coalesced",
        "all_gather_into_tensor",
        "all_gather_into_tensor_coalesced",
    }
)
REDUCE_SCATTERS = frozenset(
    {
        "_reduce_scatter_base",
        "reduce_scatter",
        "reduce_scatter_tensor_coalesced",
        "reduce_scatter_tensor",
    }
)
ALL_REDUCES = frozenset({"allreduce", "allreduce_coalesced", "all_reduce", "all_reduce_coalesced"})
# Allocations and bookkeeping: they move no data.
_STILL = frozenset(
    {
        "aten::empty",
        "aten::empty_like",
        "aten::empty_strided",
        "aten::new_empty",
        "aten::new_empty_strided",
        "aten::lift_fresh",
        "aten::_local_scalar_dense",
        "aten::is_pinned",
        "aten::set_",
        "aten::resize_",
    }
)


class OpCounter(TorchDispatchMode):
    """Counts every operator under it, on plain tensors: subclasses unwrap themselves first."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()
        self.moved: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(issubclass(t, FakeTensor) for t in types):
            return func(*args, **kwargs)  # shapes are worked out: nothing runs
        if any(t not in (torch.Tensor, torch.nn.Parameter) for t in types):
            return NotImplemented
        result = func(*args, **kwargs)
        if isinstance(result, FakeTensor) or torch._C._meta_in_tls_dispatch_include():
            return result  # the same
        name = getattr(func, "_schema", None)
        name = name.name if name is not None else str(func)
        self.ops[name] += 1
        if moves_data(func, name):
            self.moved[name] += 1
        return result


def moves_data(func, name: str) -> bool:
    if getattr(func, "is_view", False) or name in _STILL:
        return False
    return name.split("::")[0] not in ("profiler", "prim")


class Counts:
    """The counts of one region; plain dictionaries, so that they can be sent to the parent."""

    def __init__(self) -> None:
        self.ops: Counter[str] = Counter()
        self.moved: Counter[str] = Counter()
        self.comms: Counter[str] = Counter()

    def add(self, other: "Counts") -> None:
        self.ops += other.ops
        self.moved += other.moved
        self.comms += other.comms

    def total(self, names: frozenset[str]) -> int:
        """Collectives of one kind as CommDebugMode saw them."""
        return sum(n for op, n in self.comms.items() if _bare(op) in names)

    def dispatched(self, names: frozenset[str]) -> int:
        """The same, as the dispatcher saw them."""
        return sum(
            n for op, n in self.ops.items() if "c10d" in op.split("::")[0] and _bare(op) in names
        )

    @property
    def all_gathers(self) -> int:
        return max(self.total(ALL_GATHERS), self.dispatched(ALL_GATHERS))

    @property
    def reduce_scatters(self) -> int:
        return max(self.total(REDUCE_SCATTERS), self.dispatched(REDUCE_SCATTERS))

    @property
    def all_reduces(self) -> int:
        return max(self.total(ALL_REDUCES), self.dispatched(ALL_REDUCES))

    @property
    def fsdp_ops(self) -> Counter[str]:
        """FSDP's own copy-in and copy-out operators."""
        return Counter({op: n for op, n in self.ops.items() if op.startswith("fsdp::")})

    def moved_beyond(self, other: "Counts") -> dict[str, int]:
        """Data-moving operators that this region has more of than ``other``."""
        return dict(self.moved - other.moved)


def _bare(op: str) -> str:
    return op.split("::")[-1].split(".")[-1].rstrip("_")


@contextlib.contextmanager
def counting(comms: bool = True) -> Iterator[Counts]:
    """Counts the region; ``comms=False`` leaves out CommDebugMode and its module hooks.

    CommDebugMode follows modules through one forward and one backward, not through several.
    """
    counts = Counts()
    counter = OpCounter()
    mode = CommDebugMode() if comms else contextlib.nullcontext()
    with mode, counter:
        yield counts
    counts.ops, counts.moved = counter.ops, counter.moved
    if comms:
        counts.comms = Counter({str(op): n for op, n in mode.get_comm_counts().items()})
