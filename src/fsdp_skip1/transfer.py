"""Unshards of offloaded groups: the transfer from the host overlaps compute.

[Note: streams of a transfer]
Memory is allocated on the stream that writes to it first, as in torch's own all-gather, so that
nothing has to wait for compute but what is about to be overwritten:

1. ``unshard`` allocates staging memory on the copy-in stream and queues the copies from the host
   there. They wait for nothing but the transfers before them.
2. ``wait_for_unshard`` makes the compute stream wait for the one event behind these copies, and
   only then allocates the parameters' buffers, there, where they are also read and freed. One
   multi-tensor copy fills them and casts on the way.
3. The copy-in stream waits for that copy, since it may be handed the same staging memory next.
   What computes with the parameters comes later, and so the next transfer overlaps it.

Transfers straight into the buffers would save that one copy, a few hundredths of a transfer's
time. But they would have to wait for all compute queued so far, which may still read the memory
that the allocator hands out; without explicit prefetching, nothing would overlap in forward.

The staging memory belongs to the pending ``AllGatherResult``. When torch drops one that nobody
waited for, the memory goes with it, to the stream that was the last to use it.

Who writes to the sharded parameter in place between the two steps may find that the transfer was
faster, as the all-gather would be at larger shard sizes; a parameter swapped for another is
transferred again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


class Staged:
    """What one unshard has on its way from the host.

    Attributes:
        inputs: by parameter, what to fill its buffers from.
        event: marks the end of the transfer.
    """

    __slots__ = ("_stream", "event", "inputs")

    def __init__(self, inputs: dict[Any, list[torch.Tensor]], stream: Any, event: Any) -> None:
        self.inputs = inputs
        self._stream = stream
        self.event = event

    def wait(self, current: Any) -> None:
        """Order what is queued on the current stream from now on behind the transfer."""
        current.wait_event(self.event)

    def release(self, current: Any) -> None:
        """Let the memory go, once the current stream is done with what is queued there so far."""
        self._stream.wait_stream(current)
        self.inputs = {}


def begin(group: Any, fsdp_params: Sequence[Any], *, in_order: bool) -> Staged:
    """Queue the transfer of a group's offloaded parameters on its copy-in stream.

    Args:
        group: a torch ``FSDPParamGroup``.
        fsdp_params: those of its parameters that are offloaded.
        in_order: whether the transfer waits for what is queued on the current stream. Where torch
            itself would gather on the current stream, users may rely on it.
    """
    handle = torch.get_device_module(group.device)
    current = handle.current_stream()
    # Absent before FSDP2's lazy initialization: then there is nothing to overlap with either.
    stream = getattr(group.comm_ctx, "all_gather_copy_in_stream", current)
    if in_order:
        stream.wait_stream(current)
    with handle.stream(stream):
        inputs = _stage(fsdp_params, group.device)
        return Staged(inputs, stream, stream.record_event())


def _stage(fsdp_params: Sequence[Any], device: torch.device) -> dict[Any, list[torch.Tensor]]:
    inputs: dict[Any, list[torch.Tensor]] = {}
    by_dtype: dict[torch.dtype, list[Any]] = {}
    for fsdp_param in fsdp_params:
        data = fsdp_param._sharded_param_data
        if type(data) is torch.Tensor and not has_hooks(fsdp_param):
            by_dtype.setdefault(data.dtype, []).append(fsdp_param)
        else:
            inputs[fsdp_param] = fsdp_param.all_gather_inputs  # torch transfers it and calls hooks
    for dtype, params in by_dtype.items():
        sources = [p._sharded_param_data.view(-1) for p in params]
        numels = [source.numel() for source in sources]
        targets = torch.empty(sum(numels), dtype=dtype, device=device).split(numels)
        torch._foreach_copy_(targets, sources, non_blocking=True)
        inputs.update(zip(params, ([target] for target in targets)))
    return inputs


def has_hooks(fsdp_param: Any) -> bool:
    """Whether the parameter is a tensor subclass with all-gather hooks of its own."""
    return hasattr(fsdp_param.sharded_param._local_tensor, "fsdp_pre_all_gather")
