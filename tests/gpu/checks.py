"""What only a GPU can show, on one rank under NCCL: ``python checks.py NAME`` runs one check.

Each runs in a process of its own, since the suite forks its ranks from a parent that must not
touch a GPU. A check raises if something is wrong; what it prints are numbers.
"""

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import fsdp_skip1
from fsdp_skip1 import transfer

BF16 = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
WIDE = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
OFFLOAD = {"offload_policy": CPUOffloadPolicy()}
KEPT = {"reshard_after_forward": False}
OPTIONS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "mixed": BF16,
    "mixed, reduced in fp32": WIDE,
    "kept for backward": KEPT,
    "replicas": {"mesh": (1, 1)},
    "replicas, mixed": {"mesh": (1, 1), **WIDE},
    "offloaded": OFFLOAD,
    "offloaded, mixed": {**OFFLOAD, **WIDE},
    "offloaded, unpinned": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "offloaded, kept for backward": {**OFFLOAD, **KEPT},
}
ARMS: dict[str, Callable[[], Any]] = {
    "stock": fsdp_skip1.disabled,
    "plugin": fsdp_skip1.enabled,
    "copying": lambda: fsdp_skip1.enabled(zero_copy=False),
}


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, dim: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.head = nn.Linear(dim, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(
    dim: int, depth: int, *, prefetch: int = 0, mesh: tuple[int, ...] = (1,), **options: Any
) -> nn.Module:
    torch.manual_seed(1)
    names = ("replicate", "shard")[-len(mesh) :]
    options["mesh"] = init_device_mesh("cuda", mesh, mesh_dim_names=names)
    model = Stack(dim, depth)
    if "offload_policy" not in options:
        model.cuda()
    blocks = list(model.blocks)
    for block in blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    for index, block in enumerate(blocks):
        if prefetch:
            block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + prefetch])
            before = blocks[max(0, index - prefetch) : index]
            block.set_modules_to_backward_prefetch(before[::-1])
    return model


def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).float().pow(2).mean()
    loss.backward()
    return loss.detach()


def train(model: nn.Module, steps: int, dim: int) -> list[torch.Tensor]:
    """Losses and, at the end, parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    results = []
    for number in range(steps):
        generator = torch.Generator().manual_seed(number)
        results.append(step(model, torch.randn(16, dim, generator=generator).cuda()))
        optimizer.step()
        optimizer.zero_grad()
    model.reshard()
    locals_ = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [t.detach().cpu().clone() for t in (*results, *locals_)]


def parity() -> None:
    """Every arm ends where stock ends, to the bit."""
    for name, options in OPTIONS.items():
        results = {}
        for arm, switch in ARMS.items():
            with switch():
                results[arm] = train(build(64, 3, **options), 3, 64)
        for arm, found in results.items():
            for index, (ours, stock) in enumerate(zip(found, results["stock"], strict=True)):
                assert torch.equal(ours, stock), f"{name}, {arm}: result {index} differs"
        print(f"{name}: equal")


def sanitizer() -> None:
    """PyTorch's stream sanitizer finds nothing; and it does find a wait that is left out."""
    from torch.cuda import _sanitizer

    _sanitizer.enable_cuda_sanitizer()
    for name, options in OPTIONS.items():
        for prefetch in (0, 2):
            with fsdp_skip1.enabled():
                train(build(64, 4, prefetch=prefetch, **options), 2, 64)
        print(f"{name}: in order")
    transfer.Staged.wait = lambda self, current: None
    with fsdp_skip1.enabled():
        try:
            train(build(64, 4, **OFFLOAD), 2, 64)
        except _sanitizer.CUDASanitizerErrors:
            return
    raise AssertionError("a transfer that nobody waits for was not noticed")


def no_host_sync() -> None:
    """Between the start of forward and the end of backward the host never waits for the device."""
    for name, options in OPTIONS.items():
        if name == "offloaded, unpinned":
            continue  # copies from there make the host wait, in stock as here
        with fsdp_skip1.enabled():
            model = build(64, 3, **options)
            x = torch.randn(16, 64).cuda()
            for number in range(3):
                with erring_on_sync() if number else contextlib.nullcontext():
                    step(model, x)
                model.zero_grad()
        print(f"{name}: no wait")


@contextlib.contextmanager
def erring_on_sync() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def overlap() -> None:
    """Most of the time that transfers take is spent beside kernels, with prefetching or without."""
    shares = {}
    for arm in ("stock", "plugin"):
        for prefetch in (0, 1, 2):
            with ARMS[arm]():
                shares[arm, prefetch] = share_beside_kernels(prefetch)
            print(f"{arm}, prefetch {prefetch}: {shares[arm, prefetch]:.0%} of transfers overlap")
    assert min(share for (arm, _), share in shares.items() if arm == "plugin") > 0.5


def share_beside_kernels(prefetch: int) -> float:
    dim = 4096
    model = build(dim, 6, prefetch=prefetch, **OFFLOAD)
    x = torch.randn(4096, dim, device="cuda")
    for _ in range(2):
        step(model, x)
        model.zero_grad()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step(model, x)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kernels = spans(events, "kernel", "")
    transfers = spans(events, "gpu_memcpy", "HtoD")
    assert transfers, "no transfer in the trace"
    beside = sum(
        max(0.0, min(end, other_end) - max(start, other_start))
        for start, end in transfers
        for other_start, other_end in kernels
    )
    return beside / sum(end - start for start, end in transfers)


def spans(events: list[dict[str, Any]], category: str, word: str) -> list[tuple[float, float]]:
    """When events of one kind ran, merged where they touch."""
    merged: list[tuple[float, float]] = []
    found = [e for e in events if e.get("cat") == category and word in e["name"]]
    for start, end in sorted((e["ts"], e["ts"] + e["dur"]) for e in found):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


CHECKS = {check.__name__: check for check in (parity, sanitizer, no_host_sync, overlap)}


def main(name: str) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    CHECKS[name]()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
