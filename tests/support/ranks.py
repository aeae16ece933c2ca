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

import torch
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


def run_ranks(
    body: Callable[[Rank], Any], world: int, timeout: float = 60.0, *, fresh: bool = False
) -> list[Any]:
    """Runs ``body`` in ``world`` forked ranks under gloo; returns their (picklable) results.

    ``fresh``: as in a process that has not imported the plugin yet, whatever the parent has.
    """

    def afresh(rank: Rank) -> Any:
        forget_plugin()
        return body(rank)

    return Launch(afresh if fresh else body, world, timeout).results()


def with_plugin(body: Callable[[], Any]) -> Any:
    """What ``body`` returns in a forked rank of its own, with the plugin on."""

    def on(_: Rank) -> Any:
        import fsdp_skip1

        fsdp_skip1.enable()
        return body()

    return run_ranks(on, 1)[0]


def forget_plugin() -> None:
    """Leave torch and the list of modules as before the first ``import fsdp_skip1``."""
    plugin = sys.modules.get("fsdp_skip1")
    if plugin is None:
        return
    plugin.disable()
    for name in [name for name in sys.modules if name.partition(".")[0] == "fsdp_skip1"]:
        del sys.modules[name]
    package = sys.modules.get("torch.distributed.fsdp._fully_shard")
    if package is not None:
        vars(package).pop("__fsdp_skip1_retire__", None)


class Launch:
    """Ranks on their way. Several launches may be in flight; each is waited for on its own."""

    def __init__(self, body: Callable[[Rank], Any], world: int, timeout: float = 60.0):
        self.world = world
        self._timeout = timeout
        self._directory = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._start = time.monotonic()
        self._pids: dict[int, int] = {}
        self._ends: dict[int, str] = {}
        for rank in range(world):
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if pid == 0:
                _child(body, rank, world, self._directory)  # never returns
            self._pids[rank] = pid

    def results(self) -> list[Any]:
        """Waits for all ranks, and leaves nothing of them behind."""
        try:
            self._wait()
            if any(self._ends.values()):
                raise RankError(self._report())
            return [
                pickle.loads((self._directory / f"{rank}.result").read_bytes())
                for rank in range(self.world)
            ]
        finally:
            self.abandon()

    def done(self) -> bool:
        """Whether all ranks have ended; never waits."""
        self._look()
        return len(self._ends) == self.world

    def abandon(self) -> None:
        for rank, pid in self._pids.items():
            if rank not in self._ends:
                _kill(pid)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _look(self) -> None:
        for rank, pid in self._pids.items():
            if rank not in self._ends:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self._ends[rank] = _describe(status)

    def _wait(self) -> None:
        deadline = self._start + self._timeout
        failed = False
        while not self.done():
            if not failed and any(self._ends.values()):
                failed = True
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
            if time.monotonic() > deadline:
                for rank, pid in self._pids.items():
                    if rank not in self._ends:
                        _dump_and_kill(pid)
                        self._ends[rank] = (
                            "killed after another rank failed"
                            if failed
                            else f"hung for {self._timeout:g} s"
                        )
                return
            time.sleep(_POLL_SECONDS)

    def _report(self) -> str:
        lines = []
        for rank in range(self.world):
            lines.append(f"--- rank {rank} of {self.world}: {self._ends[rank] or 'finished'}")
            for suffix in ("error", "stack", "log"):
                path = self._directory / f"{rank}.{suffix}"
                text = path.read_text(errors="replace").strip() if path.exists() else ""
                if suffix == "log":
                    text = "\n".join(x for x in text.splitlines() if "[Gloo] Rank" not in x)[-3000:]
                if text:
                    lines.append(f"[{suffix}]\n{text}")
        return "\n".join(lines)


def _child(body: Callable[[Rank], Any], rank: int, world: int, directory: Path) -> None:
    code = 1
    try:
        _redirect_output(directory / f"{rank}.log")
        stack = open(directory / f"{rank}.stack", "w")  # noqa: SIM115 - lives as long as the rank
        faulthandler.enable(file=stack, all_threads=True)
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        # A fork leaves torch's thread pool to be replaced by whoever asks for it first; autograd's
        # threads, which all ask at once, trip over one another.
        torch.set_num_threads(1)
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
