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
import importlib.util
from collections import Counter

import pytest

from support import arms, cpu_streams, features, machine, results, standins, warmup

cpu_streams.install_if_lacking()

# These have tox environments of their own, with the libraries in them.
collect_ignore = [] if importlib.util.find_spec("torchtitan") else ["ecosystem"]


def pytest_configure(config):
    config.addinivalue_line("markers", "scenario: runs forked gloo ranks")


def pytest_terminal_summary(terminalreporter):
    """How far the state machine came, over all processes."""
    steps = Counter()
    for report in terminalreporter.getreports("passed"):
        steps.update(dict(report.user_properties).get("machine", {}))
    if steps:
        count = sum(n for name, n in steps.items() if name.isidentifier())
        terminalreporter.write_line(f"machine: {count} random steps: {dict(steps.most_common())}")


@pytest.fixture(scope="session")
def ledger(request):
    """Each scenario runs once; its tests (one an arm) read the same result."""
    warmup.load()
    standins.install_copy_out()
    standins.install_events()
    standins.install_average()
    gc.collect()
    gc.freeze()  # fewer pages copied by forked ranks
    ledger = results.Ledger(_scenarios(request.session.items))
    yield ledger
    ledger.close()
    gc.unfreeze()


@pytest.fixture(scope="session")
def trio():
    """The three arms of the state machine."""
    trio = machine.Trio()
    yield trio
    trio.close()


def _scenarios(items):
    """In the order of their tests, and only those that will run here."""
    for item in items:
        scenario = getattr(item, "callspec", None) and item.callspec.params.get("scenario")
        if isinstance(scenario, arms.Scenario) and not features.missing(scenario.needs):
            yield scenario
