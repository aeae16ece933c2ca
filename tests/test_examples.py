"""The examples run as they are, and a script that never heard of us prints the same losses."""

from __future__ import annotations

import importlib.metadata
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed import fsdp

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(
    torch.__version__.startswith("2.6."), reason="FSDP2 of this torch does not run on CPU"
)
installed = pytest.mark.skipif(
    not importlib.metadata.entry_points(group="torch.backends", name="fsdp_skip1"),
    reason="the package is not installed, so torch cannot find it",
)


def run(*arguments: str, **variables: str) -> str:
    """Run as torchrun would with one rank, without torchrun's own import of torch."""
    kept = {name: value for name, value in os.environ.items() if name != "FSDP_SKIP1"}
    paths = os.pathsep.join(filter(None, (str(ROOT / "src"), kept.get("PYTHONPATH"))))
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**kept, "PYTHONPATH": paths, **rank, **meeting, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def steps(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("step ")]


TRAIN = str(ROOT / "examples" / "train.py")


@installed
def test_train_prints_the_same_losses_and_gathers_nothing():
    arguments = TRAIN, "--steps", "3", "--dim", "96", "--count"
    off, on = run(*arguments), run(*arguments, FSDP_SKIP1="1")
    assert len(steps(off)) == 3
    assert steps(on) == steps(off)
    wanted = "0 all-gather, 0 reduce-scatter, 0 all-reduce, 0 copy-in, 0 copy-out"
    assert f"last step: {wanted}" in on
    assert wanted not in off


def test_train_does_not_know_us():
    assert "skip1" not in Path(TRAIN).read_text().lower()


def test_the_other_examples():
    names = ["single_gpu", "hsdp_replicas"]
    if hasattr(fsdp.FSDPModule, "set_gradient_divide_factor"):
        names.append("moe_singleton_experts")
    try:
        from torch.distributed._composable import replicate_with_fsdp

        if hasattr(replicate_with_fsdp, "ReplicateModule"):
            names.append("replicate")
    except ImportError:
        pass
    # One interpreter for all, a port each.
    runner = (
        "import os, runpy, sys\n"
        "for file in sys.argv[1:]:\n"
        "    os.environ['MASTER_PORT'] = str(int(os.environ['MASTER_PORT']) + 1)\n"
        "    runpy.run_path(file, run_name='__main__')\n"
    )
    said = run("-c", runner, *(str(ROOT / "examples" / f"{name}.py") for name in names))
    assert said.count("fsdp_skip1 is on") == len(names)
    losses = [float(line.split()[-1]) for line in steps(said)]
    assert len(losses) == 5 * len(names)
    for first, last in zip(losses[::5], losses[4::5], strict=True):
        assert last < first
