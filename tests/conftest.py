"""One thread and one import of torch for the whole suite.

Scenarios fork their ranks from this process, so it must never start a thread, open a process
group or run a backward: gloo and autograd do not survive a fork. Ranks inherit the imports.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# Arms turn the plugin on and off themselves; a variable from the outside must not decide.
os.environ.pop("FSDP_SKIP1", None)

import gc

import pytest
import torch

from support import cpu_streams, results, standins, warmup

torch.set_num_threads(1)
cpu_streams.install_if_lacking()


def pytest_configure(config):
    config.addinivalue_line("markers", "scenario: runs forked gloo ranks")


@pytest.fixture(scope="session")
def ledger():
    """Each scenario runs once; its tests (one an arm) read the same result."""
    warmup.load()
    standins.install_copy_out()
    standins.install_events()
    standins.install_average()
    gc.collect()
    gc.freeze()  # fewer pages copied by forked ranks
    yield results.Ledger()
    gc.unfreeze()
