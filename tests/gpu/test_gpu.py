"""Runs each of ``checks`` on a GPU, if there is one; under four minutes in all."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

CHECKS = Path(__file__).with_name("checks.py")

# Counted without touching the GPU: see ``checks``.
pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(not dist.is_nccl_available(), reason="needs a torch with NCCL"),
]


@pytest.mark.parametrize("name", ["parity", "sanitizer", "no_host_sync", "overlap"])
def test_on_a_gpu(name):
    done = subprocess.run(
        [sys.executable, str(CHECKS), name], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    print(done.stdout)
