"""FSDP2 on a shard mesh of size 1, without the collectives and copies that change nothing.

Importing this package turns the plugin on, unless the environment says FSDP_SKIP1=0. It does not
import torch: the plugin waits until torch's FSDP2 is imported.
"""

from __future__ import annotations

from fsdp_skip1.activation import disable, disabled, enable, enabled, is_enabled, start
from fsdp_skip1.notices import FsdpSkip1Warning

# Type checkers take this name for typing.TYPE_CHECKING, and typing is dear to import.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from fsdp_skip1.report import explain, stats, status

__version__ = "0.1.0"

__all__ = [
    "FsdpSkip1Warning",
    "__version__",
    "disable",
    "disabled",
    "enable",
    "enabled",
    "explain",
    "is_enabled",
    "stats",
    "status",
]

_IN_REPORT = frozenset(("explain", "stats", "status"))


def __getattr__(name: str) -> object:
    # Reports are rarely wanted, and their imports are not free.
    if name in _IN_REPORT:
        from fsdp_skip1 import report

        return getattr(report, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


start()
