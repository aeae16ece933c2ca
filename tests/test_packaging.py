"""What an installation of the distribution brings, however it was installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import pathlib

import fsdp_skip1


def distribution():
    # Not skipped when it is missing: the suite is run on an installed package.
    return importlib.metadata.distribution("fsdp-skip1")


def test_autoload_entry_point():
    entries = importlib.metadata.entry_points(group="torch.backends", name="fsdp_skip1")
    # More than one when a source tree on sys.path holds metadata too; they must agree.
    assert {entry.value for entry in entries} == {"_fsdp_skip1_autoload:autoload"}
    for entry in entries:
        assert callable(entry.load())


def test_autoload_is_outside_the_package():
    # Importing anything inside the package would turn the plugin on.
    spec = importlib.util.find_spec("_fsdp_skip1_autoload")
    package = importlib.util.find_spec("fsdp_skip1")
    assert pathlib.Path(spec.origin).parent == pathlib.Path(package.origin).parent.parent


def test_console_script():
    (entry,) = set(importlib.metadata.entry_points(group="console_scripts", name="fsdp-skip1"))
    assert entry.value == "fsdp_skip1.cli:main"


def test_run_time_dependencies():
    required = [line for line in distribution().requires if "extra ==" not in line]
    assert sorted(required) == ["torch>=2.6", "wrapt>=1.16"]


def test_version_and_typing():
    assert distribution().version == fsdp_skip1.__version__
    assert (pathlib.Path(fsdp_skip1.__file__).parent / "py.typed").is_file()


def test_public_names():
    public = {name for name in vars(fsdp_skip1) if not name.startswith("_")}
    rooms = {name for name in public if importlib.util.find_spec(f"fsdp_skip1.{name}")}
    assert set(fsdp_skip1.__all__) - {"explain", "stats", "status"} <= public | {"__version__"}
    assert public - rooms - set(fsdp_skip1.__all__) == {"annotations", "start", "TYPE_CHECKING"}
