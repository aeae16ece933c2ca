"""Two processes a library: one with FSDP_SKIP1=1 in its environment, one without the variable."""

import contextlib
import os
import pickle
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from ecosystem.libraries import LIBRARIES, LIBRARY_OF
from support import arms, results
from support.features import missing

# Nothing of this goes over the network, and no library may try.
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "disabled",
}
TIMEOUT_SECONDS = 600


def pytest_report_header(config):
    found = []
    for package in ("torch", *(name for m in LIBRARIES.values() for name in m.PACKAGES)):
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return ", ".join(dict.fromkeys(found))


class Libraries(results.Ledger):
    """Runs all wanted scenarios of a library when the first of them is asked for."""

    def __init__(self, wanted: list[str], directory: Path) -> None:
        super().__init__()
        self._wanted = wanted
        self._directory = directory
        self._read: dict[str, list[dict[str, list[dict[str, arms.Outcome]] | str]]] = {}

    def outcomes(self, scenario: arms.Scenario) -> list[dict[str, arms.Outcome]]:
        library = LIBRARY_OF[scenario.name]
        if library not in self._read:
            self._read[library] = self._run(library)
        by_process = [done[scenario.name] for done in self._read[library]]
        for done in by_process:
            assert not isinstance(done, str), done
        return [{**off, **on} for off, on in zip(*by_process, strict=True)]

    def _run(self, library: str) -> list[dict]:
        names = [name for name in self._wanted if LIBRARY_OF[name] == library]
        started = [self._start(library, names, variable) for variable in (None, "1")]
        try:
            for process, _, log in started:
                process.wait(TIMEOUT_SECONDS)
                assert process.returncode == 0, f"{library}:\n{log.read_text()[-5000:]}"
        finally:
            for process, _, _ in started:
                process.kill()
                process.wait()
        return [pickle.loads(result.read_bytes()) for _, result, _ in started]

    def _start(self, library, names, variable):
        result = self._directory / f"{library}-{variable or 'off'}.pickle"
        process, log = start(["worker", library, result, *names], self._directory, variable)
        return process, result, log


def start(command: list, directory: Path, variable: str | None) -> tuple[subprocess.Popen, Path]:
    """A module of this package as a process that knows of the plugin by FSDP_SKIP1 or not at all."""
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(Path(__file__).parents[1])}
    # Arms may share compiled code, runs may not: that of an earlier one is not what is tested.
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(directory / "inductor")
    if variable:
        environment["FSDP_SKIP1"] = variable
    module, *arguments = map(str, command)
    log = directory / f"{module}-{arguments[0].rpartition('/')[2]}-{variable or 'off'}.log"
    with open(log, "w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", f"ecosystem.{module}", *arguments],
            env=environment, cwd=directory, stdout=output, stderr=output,
        )  # fmt: skip
    return process, log


@pytest.fixture(scope="session")
def ledger(request, tmp_path_factory):
    scenarios = [
        item.callspec.params["scenario"]
        for item in request.session.items
        if "scenario" in getattr(item, "fixturenames", ())
    ]
    wanted = dict.fromkeys(s.name for s in scenarios if not missing(s.needs))
    return Libraries(list(wanted), tmp_path_factory.mktemp("libraries"))
