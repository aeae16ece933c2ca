"""Stand-in for stream calls that FSDP2 makes and an old ``torch.cpu`` lacks.

FSDP2 drives every device through ``torch.<device>.Stream`` and ``Event``. CPU streams are empty
shells, and torch 2.6 forgot two of their methods, so that FSDP2 there cannot run on CPU at all.
Later releases have them as methods that do nothing; so do these.
"""

import torch


def _record_event(self, event=None):
    return None


def _wait_event(self, event):
    return None


_METHODS = {"record_event": _record_event, "wait_event": _wait_event}


def lacking() -> list[str]:
    """Names of the stream methods that FSDP2 calls and this release does not have."""
    return [name for name in _METHODS if not hasattr(torch.cpu.Stream, name)]


def install_if_lacking() -> None:
    for name in lacking():
        setattr(torch.cpu.Stream, name, _METHODS[name])
