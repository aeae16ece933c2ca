"""`fsdp-skip1 doctor`: whether the skip works here, in text for a bug report. Imports no torch."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import _fsdp_skip1_autoload as variable
import fsdp_skip1
from fsdp_skip1.report import VARIABLES, Stats
from fsdp_skip1.text import aligned

WORKS, OFF, CANNOT = 0, 1, 2
TIMEOUT_S = 300

# `import torch` comes first, as in a script that never heard of us. The current directory is no
# place to import from: it may hold torch's own sources.
_CHILD = """\
import json, sys
sys.path[:] = [place for place in sys.path if place]
try:
    import torch
except Exception as error:
    print(json.dumps({"problem": f"torch cannot be imported: {error}"}))
else:
    autoloaded = "fsdp_skip1" in sys.modules
    from fsdp_skip1 import probe
    probe.main(sys.argv[1:], autoloaded)
"""


@dataclass
class Diagnosis:
    """What was found.

    Attributes:
        versions: Of all that matters.
        platform: The machine.
        variables: Environment variables that matter, as far as they are set.
        autoload: What `import torch` does about the plugin.
        status: The plugin's own status in a fresh process, with torch loaded.
        steps: What one training step did, a device each.
        verdict: The result in a sentence.
        exit_code: 0 if the skip works, 1 if the plugin is off, 2 if it cannot work here.
    """

    versions: dict[str, str]
    platform: str
    variables: dict[str, str]
    autoload: str = ""
    status: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    verdict: str = ""
    exit_code: int = CANNOT

    def to_dict(self) -> dict[str, Any]:
        """The same as plain dictionaries and lists."""
        status = {name: value for name, value in self.status.items() if name != "text"}
        return {**vars(self), "status": status}

    def __str__(self) -> str:
        rows = [[name, version] for name, version in self.versions.items()]
        rows.append(["platform", self.platform])
        rows += [["variable", f"{name}={value}"] for name, value in self.variables.items()]
        rows.append(["autoload", self.autoload])
        parts = ["\n".join(aligned(rows))]
        if "text" in self.status:
            parts.append(f"In a fresh process:\n\n{self.status['text']}")
        parts += [_step_text(step) for step in self.steps]
        parts.append(f"{self.verdict[0].upper()}{self.verdict[1:]}. (exit code {self.exit_code})")
        return "\n\n".join(parts)


def diagnose(device: str | None = None) -> Diagnosis:
    """Look at this installation, and run one training step in a fresh process.

    Args:
        device: "cpu" or "cuda"; None for all there are.
    """
    found = Diagnosis(
        versions={
            "fsdp_skip1": fsdp_skip1.__version__,
            "python": f"{platform.python_version()} ({platform.python_implementation()})",
            "torch": _version("torch"),
            "wrapt": _version("wrapt"),
        },
        platform=platform.platform(),
        variables={name: os.environ[name] for name in VARIABLES if name in os.environ},
    )
    said, problem = _run_probe(device or "any")
    for line in said:
        if "torch" in line:
            cuda = f", CUDA {line['cuda']}" if line["cuda"] else ""
            found.versions["torch"] = f"{line['torch']}{cuda}"
        found.status = line.get("status", found.status)
        if "step" in line:
            found.steps.append(line["step"])
        problem = problem or line.get("problem")
    found.autoload = _autoload(any(line.get("autoloaded") for line in said))
    found.exit_code, found.verdict = _judge(found, problem)
    return found


def _run_probe(device: str) -> tuple[list[dict[str, Any]], str | None]:
    """What the probe said, and what went wrong with it."""
    # Collectives over one rank need no network.
    environment = {"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CHILD, device],
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [], f"the step did not end within {TIMEOUT_S} s"
    said = []
    for line in done.stdout.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            said.append(value)
    if done.returncode == 0:
        return said, None
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return said, f"the process that tries it ended with code {done.returncode}: {last}"


def _judge(found: Diagnosis, problem: str | None) -> tuple[int, str]:
    status = found.status
    if problem is not None:
        return CANNOT, problem
    if not status:
        return CANNOT, "the process said nothing"
    if status["obstacle"] is not None:
        return CANNOT, f"the plugin does not work with this torch: {status['obstacle']}"
    if not status["on"]:
        return OFF, f"the plugin is off: {status['why']}"
    tried = [step for step in found.steps if "hindrance" not in step]
    faults = [f"{step['device']}: {fault}" for step in tried for fault in _faults(step)]
    if faults:
        return CANNOT, f"the skip does not work here: {'; '.join(faults)}"
    if not tried:
        why = "; ".join(f"{step['device']}: {step['hindrance']}" for step in found.steps)
        return CANNOT, f"nothing could be tried out here: {why}"
    return WORKS, f"the skip works on {' and '.join(step['device'] for step in tried)}"


def _faults(step: dict[str, Any]) -> list[str]:
    if "problem" in step:
        return [step["problem"]]
    left = [
        f"{number} {kind.replace('_', '-')} left" for kind, number in step["on"].items() if number
    ]
    if not (step["bit_equal_to_stock"] or step["bit_equal_to_plain"]):
        left.append("losses, gradients or parameters differ")
    return left


def _step_text(step: dict[str, Any]) -> str:
    title = f"One training step of two layers on {step['device']}, world size 1"
    for what in ("hindrance", "problem"):
        if what in step:
            return f"{title}: {step[what]}"
    kinds = list(step["off"])
    rows = [["beyond the plain module", *(kind.replace("_", "-") for kind in kinds)]]
    for arm, name in (("off", "stock FSDP2"), ("on", "with fsdp_skip1")):
        rows.append([name, *(str(step[arm][kind]) for kind in kinds)])
    table = aligned(rows, right=range(1, len(kinds) + 1))
    same = "bit-equal to stock" if step["bit_equal_to_stock"] else "DIFFER"
    numbers = f"Loss, gradients and new weights: {same}"
    return "\n".join([title, "", *table, "", numbers, str(Stats(**step["stats"]))])


def _autoload(seen: bool) -> str:
    """What torch's plugin autoload does here."""
    wanted = variable.reading(os.environ.get(variable.VARIABLE))
    if seen:
        return "`import torch` alone brings the plugin in"
    entries = importlib.metadata.entry_points(group="torch.backends", name="fsdp_skip1")
    if not entries:
        return (
            "no entry point, since the package is not installed here: FSDP_SKIP1=1 alone does "
            "nothing, `import fsdp_skip1` works"
        )
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        return (
            "entry point registered, but TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from calling "
            "it: FSDP_SKIP1=1 alone does nothing, `import fsdp_skip1` works"
        )
    if wanted:
        return "entry point registered, but `import torch` did not call it"
    return "entry point registered; with FSDP_SKIP1=1 `import torch` alone brings the plugin in"


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
