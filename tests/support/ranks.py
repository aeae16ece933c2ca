"""Forks the ranks of a small process group and brings back what they return.

A fork costs tens of milliseconds where a fresh interpreter pays seconds for ``import torch``, and
still gives each scenario a process of its own. Nothing outlives a call: a rank that fails takes
the others with it, and a rank that hangs is made to write down where it stands, then killed.
"""

import faulthandler
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

_POLL_SECONDS = 0.004
# What the other ranks get to report their own errors once one rank has failed.
_GRACE_SECONDS = 3.0


class RankError(AssertionError):
    """At least one rank failed, died or hung; the message holds every rank's traceback."""


@dataclass(frozen=True)
class Rank:
    """What a forked rank knows about its group."""

    rank: int
    world: int
    directory: Path
    store: dist.Store


def run_ranks(body: Callable[[Rank], Any], world: int, timeout: float = 60.0) -> list[Any]:
    """Runs ``body`` in ``world`` forked ranks under gloo; returns their (picklable) results."""
    directory = Path(tempfile.mkdtemp(prefix="ranks-"))
    pids: dict[int, int] = {}
    try:
        for rank in range(world):
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if pid == 0:
                _child(body, rank, world, directory)  # never returns
            pids[rank] = pid
        ends = _wait(pids, directory, timeout)
        return _collect(ends, world, directory, timeout)
    finally:
        for pid in pids.values():
            _kill(pid)
        shutil.rmtree(directory, ignore_errors=True)


def _child(body: Callable[[Rank], Any], rank: int, world: int, directory: Path) -> None:
    code = 1
    try:
        _redirect_output(directory / f"{rank}.log")
        stack = open(directory / f"{rank}.stack", "w")  # noqa: SIM115 - lives as long as the rank
        faulthandler.enable(file=stack, all_threads=True)
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        if world == 1:
            store: dist.Store = dist.HashStore()
        else:
            store = dist.FileStore(str(directory / "store"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        value = body(Rank(rank, world, directory, store))
        _write(directory / f"{rank}.result", value)
        if world > 1:
            dist.barrier()  # nobody leaves while a peer still reads from its sockets
        code = 0
    except BaseException:
        (directory / f"{rank}.error").write_text(traceback.format_exc())
    finally:
        os._exit(code)


def _redirect_output(log: Path) -> None:
    """The parent's capture must not mix with a rank's output, which is shown only on failure."""
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _write(path: Path, value: Any) -> None:
    scratch = path.with_suffix(".partial")
    with open(scratch, "wb") as file:
        pickle.dump(value, file)
    scratch.rename(path)


def _wait(pids: dict[int, int], directory: Path, timeout: float) -> dict[int, str]:
    """Waits for all ranks; ends maps a rank to how it ended (empty when well)."""
    ends: dict[int, str] = {}
    deadline = time.monotonic() + timeout
    failed = False
    while len(ends) < len(pids):
        for rank, pid in pids.items():
            if rank in ends:
                continue
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done:
                continue
            ends[rank] = _describe(status)
            if ends[rank] and not failed:
                failed = True
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if time.monotonic() > deadline:
            for rank, pid in pids.items():
                if rank not in ends:
                    why = "killed after another rank failed" if failed else "hung"
                    _dump_and_kill(pid)
                    ends[rank] = why
            break
        time.sleep(_POLL_SECONDS)
    return ends


def _describe(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"died of {signal.Signals(os.WTERMSIG(status)).name}"
    code = os.WEXITSTATUS(status)
    return f"exited with {code}" if code else ""


def _dump_and_kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGUSR1)  # faulthandler writes every thread's stack
        time.sleep(0.2)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def _kill(pid: int) -> None:
    try:
        done, _ = os.waitpid(pid, os.WNOHANG)
        if not done:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def _collect(ends: dict[int, str], world: int, directory: Path, timeout: float) -> list[Any]:
    if any(ends.values()):
        raise RankError(_report(ends, world, directory, timeout))
    results = []
    for rank in range(world):
        with open(directory / f"{rank}.result", "rb") as file:
            results.append(pickle.load(file))
    return results


def _report(ends: dict[int, str], world: int, directory: Path, timeout: float) -> str:
    lines = []
    for rank in range(world):
        how = ends[rank] or "finished"
        if how == "hung":
            how = f"hung for {timeout:g} s"
        lines.append(f"--- rank {rank} of {world}: {how}")
        for suffix in ("error", "stack", "log"):
            path = directory / f"{rank}.{suffix}"
            text = path.read_text(errors="replace").strip() if path.exists() else ""
            if suffix == "log":
                text = "\n".join(x for x in text.splitlines() if "[Gloo] Rank" not in x)[-3000:]
            if text:
                lines.append(f"[{suffix}]\n{text}")
    return "\n".join(lines)
