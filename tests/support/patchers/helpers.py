"""Like torch's own test helpers, and ``unittest.mock``: saved and restored around a block."""

from typing import Any
from unittest import mock

from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

calls = 0
_undo: list[Any] = []


def _around(original: Any) -> Any:
    def new(*args: Any, **kwargs: Any) -> Any:
        global calls
        calls += 1
        return original(*args, **kwargs)

    return new


def install() -> None:
    unshard, reduce = FSDPParamGroup.unshard, param_group.foreach_reduce
    FSDPParamGroup.unshard = _around(unshard)
    param_group.foreach_reduce = _around(reduce)
    wait = mock.patch.object(
        FSDPParamGroup, "wait_for_unshard", _around(FSDPParamGroup.wait_for_unshard)
    )
    wait.start()

    def restore() -> None:
        wait.stop()
        param_group.foreach_reduce = reduce
        FSDPParamGroup.unshard = unshard

    _undo.append(restore)


def undo() -> None:
    _undo.pop()()
