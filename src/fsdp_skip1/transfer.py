"""Unshards of offloaded groups: the transfer from the host overlaps the previous group's compute.

[Note: streams of a transfer]
The buffers are allocated on the compute stream, which is also where they are read and freed. So
the allocator may hand out memory that work already queued there still uses, and the copy-in
stream waits for that work before it writes: all of it was queued before this group's prefetch,
that is before the compute of the group that prefetches, and that compute is what the transfer
overlaps. One event, recorded behind the last write, is all that the compute stream waits for.

Staging memory for a cast is allocated, written, read and freed on the copy-in stream alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def has_streams(device: torch.device) -> bool:
    """Whether work can be queued on this device at all."""
    return device.type not in ("cpu", "meta")


def issue(group: Any, work: Callable[[], None]) -> Any:
    """Run ``work`` on the group's copy-in stream; return the event that marks its end."""
    handle = torch.get_device_module(group.device)
    current = handle.current_stream()
    # Absent before FSDP2's lazy initialization: then there is nothing to overlap with either.
    stream = getattr(group.comm_ctx, "all_gather_copy_in_stream", current)
    stream.wait_stream(current)
    with handle.stream(stream):
        work()
        return stream.record_event()


def wait(group: Any, event: Any) -> None:
    """Let the compute stream wait for a transfer."""
    torch.get_device_module(group.device).current_stream().wait_event(event)
