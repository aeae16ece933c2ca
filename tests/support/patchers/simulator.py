"""Keeps the originals on the class, under other names."""

from typing import Any

from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

calls = 0


def _unshard(self: Any, async_op: bool = False) -> None:
    global calls
    calls += 1
    return FSDPParamGroup._sim_orig_unshard(self, async_op)


def _wait_for_unshard(self: Any) -> None:
    return FSDPParamGroup._sim_orig_wait_for_unshard(self)


def install() -> None:
    FSDPParamGroup._sim_orig_unshard = FSDPParamGroup.unshard
    FSDPParamGroup._sim_orig_wait_for_unshard = FSDPParamGroup.wait_for_unshard
    FSDPParamGroup.unshard = _unshard
    FSDPParamGroup.wait_for_unshard = _wait_for_unshard


def undo() -> None:
    FSDPParamGroup.unshard = FSDPParamGroup._sim_orig_unshard
    FSDPParamGroup.wait_for_unshard = FSDPParamGroup._sim_orig_wait_for_unshard
    del FSDPParamGroup._sim_orig_unshard, FSDPParamGroup._sim_orig_wait_for_unshard
