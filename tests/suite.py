"""Runs the tests, as tox does: all of them, or what is given as arguments.

Some files want a parent process in which nobody has imported the plugin, and get one of their own.
"""

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
CLEAN = [
    str(TESTS / f"test_{name}.py")
    for name in ("standing_aside", "other_patchers", "undo", "others")
]
REST = [f"--ignore={path}" for path in (*CLEAN, TESTS / "ecosystem")]
PYTEST = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal"]


def main(given: list[str]) -> int:
    """Exit code of the first run that fails, else 0."""
    runs = [given] if given else [CLEAN, [str(TESTS), *REST]]
    return next((code for run in runs if (code := subprocess.call(PYTEST + run))), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
