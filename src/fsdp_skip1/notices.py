"""How the plugin talks: one warning a matter, and a log. Neither ever raises."""

from __future__ import annotations

import os
import sys

# Type checkers take this name for typing.TYPE_CHECKING, and typing is dear to import.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from logging import Logger, LogRecord
    from typing import TypeAlias

    _Registry: TypeAlias = dict[str | tuple[str, type[Warning], int], int]

VARIABLE = "FSDP_SKIP1_LOG"

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
_LOGGER = "fsdp_skip1"
_said: dict[str, object] = {}
_variable_read = False


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
    """Write to the logger `fsdp_skip1`. Never raises.

    Adds no handler, unless the variable FSDP_SKIP1_LOG asks for one.

    Args:
        level_name: "debug", "info", "warning" or "error".
        message: The message, with %-style places for `args`.
        *args: What goes into the places.
    """
    try:
        logger = _logger(_LEVELS[level_name])
        if logger is not None:
            logger.log(_LEVELS[level_name], message, *args)
    except Exception:
        pass


def heard(level_name: str) -> bool:
    """Whether anybody would see a line of this level. Never raises."""
    try:
        logger = _logger(_LEVELS[level_name])
        return logger is not None and logger.isEnabledFor(_LEVELS[level_name])
    except Exception:
        return False


def announce(key: str, message: str, *args: object) -> None:
    """Log what people look for in a job's output: on rank 0 at info, else at debug.

    What was announced under `key` in this process before goes to debug, too. Never raises.
    """
    token = object()
    first = _said.setdefault(f"announced:{key}", token) is token
    log("info" if first and rank() == 0 else "debug", message, *args)


def rank() -> int:
    """This process's rank: of the process group if there is one, else what the launcher says."""
    try:
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_initialized():
            return int(distributed.get_rank())
        return int(os.environ.get("RANK") or 0)
    except Exception:
        return 0


def _logger(level: int) -> Logger | None:
    """The logger, made ready; None while nobody can have asked for a line of this level."""
    global _variable_read
    if not _variable_read:
        _variable_read = True
        _obey_variable()
    # While nobody has imported logging, nobody has asked for anything below a warning.
    if level < 30 and "logging" not in sys.modules:
        return None
    import logging

    return logging.getLogger(_LOGGER)


def _obey_variable() -> None:
    """Set the level that FSDP_SKIP1_LOG names, and see to it that lines appear somewhere."""
    word = os.environ.get(VARIABLE, "").strip().lower()
    if not word:
        return
    if word not in _LEVELS:
        warn_once(
            "log-variable",
            f"{VARIABLE}={word!r} is ignored: it takes {', '.join(list(_LEVELS)[:-1])} or error",
        )
        return
    import logging

    class Fallback(logging.StreamHandler):  # type: ignore[type-arg]
        """Writes to stderr as long as no other handler would hear of the line.

        So lines appear at once, and still once only after the program has set up its own logging.
        """

        fsdp_skip1_fallback = True

        def emit(self, record: LogRecord) -> None:
            logger: Logger | None = logging.getLogger(_LOGGER)
            while logger is not None:
                for handler in logger.handlers:
                    if not _is_fallback(handler) and record.levelno >= handler.level:
                        return
                logger = logger.parent if logger.propagate else None
            self.stream = sys.stderr  # which may have been replaced since
            super().emit(record)

        def format(self, record: LogRecord) -> str:
            return f"fsdp_skip1 [rank {rank()}] {record.levelname.lower()}: {record.getMessage()}"

    logger = logging.getLogger(_LOGGER)
    logger.setLevel(_LEVELS[word])
    # Another copy of this module may have been here: somebody emptied sys.modules.
    if not any(_is_fallback(handler) for handler in logger.handlers):
        logger.addHandler(Fallback())


def _is_fallback(handler: object) -> bool:
    return bool(getattr(handler, "fsdp_skip1_fallback", False))


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
