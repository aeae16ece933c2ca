"""Process groups without torchrun: one rank in this process, or several in their own."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fsdp_skip1.bench import BenchError, output
from fsdp_skip1.bench.options import Options
from fsdp_skip1.bench.results import Arm, Comparison, Report, Spread


def measure(options: Options) -> Report:
    """Measure every model that the options name.

    Raises:
        BenchError: If this torch or this machine cannot do what is asked.
    """
    # To be set before torch is loaded: its libraries' own remarks would break the progress bar.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    if options.nproc > 1 and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # no network is needed, nor name look-ups
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        raise BenchError(f"torch cannot be imported: {error}") from error
    _check(options)

    if options.nproc == 1:
        comparisons, wrapper = _rank(options, dist.HashStore(), 0)
    else:
        with tempfile.TemporaryDirectory() as folder:
            store, found = Path(folder, "store"), Path(folder, "found.json")
            torch.multiprocessing.spawn(
                _spawned, args=(options, str(store), str(found)), nprocs=options.nproc
            )
            read = json.loads(found.read_text())
        if "problem" in read:
            raise BenchError(read["problem"])
        comparisons = [_comparison(value) for value in read["comparisons"]]
        wrapper = read["wrapper"]
    return Report(_machine(options), _plain(options), comparisons, wrapper)


def _check(options: Options) -> None:
    import torch

    if options.device == "cuda" and torch.cuda.device_count() < options.nproc:
        raise BenchError(
            f"--device cuda with {options.nproc} rank(s) needs as many GPUs, and torch "
            f"{torch.__version__} sees {torch.cuda.device_count()}; --device cpu works everywhere"
        )
    if options.device == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
        raise BenchError(
            f"FSDP2 of torch {torch.__version__} does not run on CPU (2.7 and later do); "
            "use --device cuda"
        )


def _spawned(rank: int, options: Options, store: str, found: str) -> None:
    """A rank of several. Rank 0 leaves what was found in a file."""
    import torch.distributed as dist

    problem = None
    comparisons: list[Comparison] = []
    wrapper = None
    try:
        comparisons, wrapper = _rank(options, dist.FileStore(store, options.nproc), rank)
    except BenchError as error:
        problem = str(error)
    if rank == 0:
        answer: dict[str, Any] = {"comparisons": [asdict(value) for value in comparisons]}
        answer["wrapper"] = wrapper
        if problem is not None:
            answer["problem"] = problem
        Path(found).write_text(json.dumps(answer))


def _rank(options: Options, store: Any, rank: int) -> tuple[list[Comparison], float | None]:
    import torch
    import torch.distributed as dist

    from fsdp_skip1.bench import measure as measuring

    device = torch.device(options.device)
    threads = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    if device.type == "cuda":
        torch.cuda.set_device(rank)
        device = torch.device("cuda", rank)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=options.nproc,
    )
    arms = 3 if options.nproc == 1 else 5
    turns = arms * measuring.rounds(options.steps) * len(options.model)
    try:
        with output.progress(turns, show=rank == 0) as advance:
            comparisons = [
                measuring.compare(options, model, device, _named(advance, model))
                for model in options.model
            ]
        wrapper = measuring.wrapper_cost(device) if options.nproc > 1 else None
        return comparisons, wrapper
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(threads)


def _named(advance: Callable[[str], None], model: str) -> Callable[[], None]:
    return lambda: advance(model)


def _comparison(read: dict[str, Any]) -> Comparison:
    arms = []
    for value in read["arms"]:
        ratio = value.pop("ratio")
        arms.append(Arm(**value, ratio=Spread(**ratio) if ratio else None))
    return Comparison(**{**read, "arms": arms})


def _machine(options: Options) -> dict[str, str]:
    import torch

    import fsdp_skip1

    if options.device == "cuda":
        device = torch.cuda.get_device_name()
    else:
        threads = "1 thread" if options.threads == 1 else f"{options.threads} threads"
        device = f"{platform.machine()} CPU, {threads}"
    return {
        "fsdp_skip1": fsdp_skip1.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
        "device": device,
    }


def _plain(options: Options) -> dict[str, Any]:
    return {
        key: str(value) if isinstance(value, Path) else value
        for key, value in asdict(options).items()
        if key not in ("json", "plot", "trace", "table")
    }
