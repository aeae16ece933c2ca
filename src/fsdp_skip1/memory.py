"""Whose memory the unsharded parameter looks at: the sharded parameter's, or a private buffer.

[Note: shared memory]
FSDP2 makes the unsharded ``nn.Parameter`` once, over the flat buffer in
``fsdp_param.all_gather_outputs``, frees that buffer at reshard by resizing its storage to zero,
and refills it at the next unshard. Resizing the sharded parameter's own storage would destroy
the parameter. So while memory is shared, ``all_gather_outputs`` is empty: stock's free then has
nothing to free, and the empty list is also the mark of the state.

The parameter object never changes, since hooks, compiled guards and users hold on to it; only
the memory behind it does, through ``.data``. That assignment also gives it a version counter of
its own: an optimizer that steps the sharded parameter between forward and backward must not
make backward complain, as it does not in stock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


def is_shared(fsdp_param: Any) -> bool:
    """Whether the unsharded parameter is a view of the sharded parameter's memory."""
    return not fsdp_param.all_gather_outputs and hasattr(fsdp_param, "_unsharded_param")


def share(fsdp_param: Any) -> None:
    """Point the unsharded parameter at the sharded parameter's memory; allocates nothing.

    Call outside inference mode and without grad.
    """
    # ``.data``, not ``detach()``: see [Note: shared memory] on version counters.
    flat = fsdp_param._sharded_param_data.data.view(-1)
    _rebuild_if_unusable(fsdp_param, flat.dtype)
    if not hasattr(fsdp_param, "_unsharded_param"):
        # torch builds the parameter itself, so that DTensor specs and gradient dtypes are as
        # this release wants them; it finds our view where it expects its buffer.
        fsdp_param.all_gather_outputs = [flat]
        try:
            fsdp_param.init_unsharded_param()
        finally:
            fsdp_param.all_gather_outputs = []
        if flat.storage_offset() != 0:  # torch assumes that its buffer starts at zero
            _point_at(fsdp_param, flat)
        return
    _point_at(fsdp_param, flat)
    fsdp_param.all_gather_outputs = []


def make_private(fsdp_param: Any, *, filled: bool) -> None:
    """Give a sharing parameter a buffer of its own, as stock would have left it.

    ``filled``: with the parameter's data (the group is unsharded); else with empty storage
    (resharded). Does nothing for a parameter that already has its own.
    """
    unsharded = getattr(fsdp_param, "_unsharded_param", None)
    if unsharded is None:
        return
    data = fsdp_param._sharded_param_data
    shared = _same_storage(_local(unsharded), data)
    # A buffer that the parameter does not look at is torch's, which did not know of the sharing.
    if fsdp_param.all_gather_outputs and not shared:
        return
    with torch.inference_mode(False), torch.no_grad():
        local = _local(unsharded)
        buffer = torch.empty(fsdp_param._orig_size.numel(), dtype=local.dtype, device=local.device)
        if filled:
            buffer.copy_(data.view(-1))
        # Other memory that the user gave to an unsharded parameter stays the user's.
        if shared or not filled:
            _point_at(fsdp_param, buffer)
        fsdp_param.all_gather_outputs = [buffer]
        if not filled:
            buffer.untyped_storage().resize_(0)


def prepare_buffers(
    fsdp_param: Any, numels: Sequence[int], dtypes: Sequence[torch.dtype]
) -> list[torch.Tensor]:
    """The private flat buffers to unshard into, allocated; made at first use, then kept.

    Call outside inference mode and without grad.
    """
    device = fsdp_param.device
    existing = fsdp_param.all_gather_outputs
    if existing and not _fits(existing, numels, dtypes):
        fsdp_param.all_gather_outputs = existing = []
    make_private_again = not existing and hasattr(fsdp_param, "_unsharded_param")
    fsdp_param.init_all_gather_outputs(list(numels), list(dtypes), 1, device)
    fsdp_param.alloc_all_gather_outputs()
    buffers: list[torch.Tensor] = fsdp_param.all_gather_outputs
    if make_private_again and len(buffers) == 1:
        _rebuild_if_unusable(fsdp_param, dtypes[0])
        if hasattr(fsdp_param, "_unsharded_param"):
            _point_at(fsdp_param, buffers[0])
    return buffers


def _fits(
    buffers: Sequence[torch.Tensor], numels: Sequence[int], dtypes: Sequence[torch.dtype]
) -> bool:
    return len(buffers) == len(numels) and all(
        buffer.numel() == numel and buffer.dtype == dtype and not buffer.is_inference()
        for buffer, numel, dtype in zip(buffers, numels, dtypes)
    )


def _rebuild_if_unusable(fsdp_param: Any, dtype: torch.dtype) -> None:
    """Drop an unsharded parameter that no assignment of ``.data`` can make right.

    One that stock made in inference mode can never train; a DTensor whose dtype changed
    carries the old dtype in its spec.
    """
    unsharded = getattr(fsdp_param, "_unsharded_param", None)
    if unsharded is None:
        return
    local = _local(unsharded)
    if local.is_inference() or (local is not unsharded and local.dtype != dtype):
        del fsdp_param._unsharded_param


def _point_at(fsdp_param: Any, flat: torch.Tensor) -> None:
    _local(fsdp_param._unsharded_param).data = flat.as_strided(
        fsdp_param._orig_size, fsdp_param._contiguous_orig_stride, flat.storage_offset()
    )


def _same_storage(left: torch.Tensor, right: torch.Tensor) -> bool:
    if type(right) is not torch.Tensor:  # a subclass lends no memory
        return False
    same: bool = left.untyped_storage()._cdata == right.untyped_storage()._cdata
    return same


def _local(param: torch.Tensor) -> torch.Tensor:
    """The plain tensor behind a parameter, which beside tensor parallelism is a DTensor."""
    local: torch.Tensor = getattr(param, "_local_tensor", param)
    return local
