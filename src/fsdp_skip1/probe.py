"""What `fsdp-skip1 doctor` runs in a process of its own: a step with the plugin and one without.

A line of JSON for each thing found, so that what was found before a crash is not lost.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_skip1

LAYERS = 2
DIM = 64

# Names of operators in the namespace c10d begin like this.
_COLLECTIVES = {
    "all_gathers": ("_allgather", "allgather", "all_gather"),
    "reduce_scatters": ("_reduce_scatter", "reduce_scatter"),
    "all_reduces": ("allreduce", "all_reduce"),
}
# Operators, beside views, that move no data.
_STILL = frozenset(
    (
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "record_stream",
        "resize_",
        "set_",
    )
)


def main(arguments: Sequence[str], autoloaded: bool) -> None:
    """Write what there is to find to the standard output.

    Args:
        arguments: The devices to try: "cpu", "cuda", or "any" for all there are.
        autoloaded: Whether `import torch` alone had brought the plugin in.
    """
    _say(torch=torch.__version__, cuda=torch.version.cuda, autoloaded=autoloaded)
    try:
        import_module("torch.distributed.fsdp")
    except ImportError as error:
        _say(problem=f"torch.distributed.fsdp cannot be imported: {error}")
    _say(status={**fsdp_skip1.status().to_dict(), "text": str(fsdp_skip1.status())})
    if not fsdp_skip1.is_enabled():
        return
    devices = list(arguments)
    if devices == ["any"]:
        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    for device in devices:
        hindrance = _hindrance(device)
        if hindrance is not None:
            _say(step={"device": device, "hindrance": hindrance})
            continue
        try:
            with _process_group(device):
                _say(step=_compare(device))
        except Exception as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            _say(step={"device": device, "problem": f"the step failed: {text}"})


def _say(**what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def _hindrance(device: str) -> str | None:
    """Why FSDP2 cannot run there at all, with the plugin or without."""
    try:
        from torch.distributed.fsdp import fully_shard  # noqa: F401
    except ImportError:
        return (
            "this torch has no FSDP2 (fully_shard), which lives in torch.distributed.fsdp from 2.6"
        )
    if not torch.distributed.is_available():
        return "this torch was built without torch.distributed"
    if device == "cuda" and not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if device == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
        return f"FSDP2 of torch {torch.__version__} does not run on CPU (from 2.7 on it does)"
    return None


@contextmanager
def _process_group(device: str) -> Iterator[None]:
    import torch.distributed as dist

    if device == "cuda":
        torch.cuda.set_device(0)
    backend = "nccl" if device == "cuda" and dist.is_nccl_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _compare(device: str) -> dict[str, Any]:
    with fsdp_skip1.disabled():
        plain, _, plain_result = _step(device, shard=False)
        off, _, off_result = _step(device, shard=True)
    on, explanation, on_result = _step(device, shard=True)
    same = all(torch.equal(a, b) for a, b in zip(on_result, off_result))
    exact = all(torch.equal(a, b) for a, b in zip(on_result, plain_result))
    return {
        "device": device,
        "off": _beyond(off, plain),
        "on": _beyond(on, plain),
        "bit_equal_to_stock": same,
        "bit_equal_to_plain": exact,
        "stats": fsdp_skip1.stats().to_dict(),
        "explanation": explanation,
    }


def _step(device: str, *, shard: bool) -> tuple[Counter[str], str, list[torch.Tensor]]:
    """One training step of a new model: its operators, its explanation, and all its numbers."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(DIM, DIM) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*layers).to(device)
    explanation = ""
    if shard:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(device, (1,))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        explanation = str(fsdp_skip1.explain(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(8, DIM).to(device)
    with _Operators() as operators:
        loss = model(inputs).square().mean()
        loss.backward()
    grads = [_local(parameter.grad).cpu() for parameter in model.parameters()]
    optimizer.step()
    weights = [_local(parameter.detach()).cpu() for parameter in model.parameters()]
    return operators.counts, explanation, [loss.detach().cpu(), *grads, *weights]


class _Operators(TorchDispatchMode):
    """Counts the operators that move data, on local tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._dtensor = import_module("torch.distributed.tensor").DTensor
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, self._dtensor) for kind in types):
            return NotImplemented
        namespace, _, name = str(func._overloadpacket).partition(".")
        if not func.is_view and name not in _STILL and namespace != "profiler":
            self.counts[f"{namespace}.{name}"] += 1
        return func(*args, **(kwargs or {}))


def _beyond(counts: Counter[str], plain: Counter[str]) -> dict[str, int]:
    """What a step does beyond the plain module's: collectives by kind, and copies."""
    found = dict.fromkeys((*_COLLECTIVES, "copies"), 0)
    for operator, number in (counts - plain).items():
        namespace, _, name = operator.partition(".")
        if namespace not in ("c10d", "_c10d_functional"):
            found["copies"] += number
            continue
        for kind, beginnings in _COLLECTIVES.items():
            if name.startswith(beginnings):
                found[kind] += number
    return found


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.clone()
