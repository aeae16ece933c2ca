"""How the plugin talks: one warning a matter, and a log. Neither ever raises."""

from __future__ import annotations

import sys

# Type checkers take this name for typing.TYPE_CHECKING, and typing is dear to import.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

    _Registry: TypeAlias = dict[str | tuple[str, type[Warning], int], int]

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
_LOGGER = "fsdp_skip1"
_said: dict[str, object] = {}


class FsdpSkip1Warning(UserWarning):
    """Every warning of this package: the plugin could not do what it was asked to do."""


def warn_once(key: str, message: str) -> None:
    """Warn with `message`, unless something was said under `key` in this process before.

    The warning points at the first caller outside this package and the import machinery. It never
    raises: where the filters turn warnings into errors, the message goes to the log.
    """
    token = object()
    # One atomic step, so that of several threads exactly one speaks.
    if _said.setdefault(key, token) is not token:
        return
    try:
        import warnings

        filename, lineno, module, registry = _culprit()
        warnings.warn_explicit(
            message, FsdpSkip1Warning, filename, lineno, module=module, registry=registry
        )
    except Exception:
        log("warning", "%s", message)


def log(level_name: str, message: str, *args: object) -> None:
    """Write to the logger `fsdp_skip1`. Adds no handler and never raises.

    Args:
        level_name: "debug", "info", "warning" or "error".
        message: The message, with %-style places for `args`.
        *args: What goes into the places.
    """
    try:
        level = _LEVELS[level_name]
        # While nobody has imported logging, nobody has asked for anything below a warning.
        if level < 30 and "logging" not in sys.modules:
            return
        import logging

        logging.getLogger(_LOGGER).log(level, message, *args)
    except Exception:
        pass


def _culprit() -> tuple[str, int, str, _Registry]:
    """The place a warning should point at, as `warnings.warn_explicit` wants it.

    Counted by hand, because `warnings.warn` can skip frames by their file only from Python 3.12 on.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] not in _PASSED_OVER:
            break
        frame = frame.f_back
    registry: _Registry = frame.f_globals.setdefault("__warningregistry__", {})
    module = str(frame.f_globals.get("__name__", "<unknown>"))
    return frame.f_code.co_filename, frame.f_lineno, module, registry


_PASSED_OVER = frozenset(
    ("fsdp_skip1", "_fsdp_skip1_autoload", "importlib", "_frozen_importlib", "wrapt", "contextlib")
)
