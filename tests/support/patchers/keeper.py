"""Methods replaced by copies, though the originals are at hand: they are kept for the undo only."""

from typing import Any

from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from support.patchers import copied

calls = 0
_undo: list[Any] = []


def install() -> None:
    original = FSDPParamGroup.wait_for_unshard
    copy = copied(original, globals())

    def wait_for_unshard(self: Any) -> Any:
        global calls
        calls += 1
        return original(self) if calls < 0 else copy(self)

    FSDPParamGroup.wait_for_unshard = wait_for_unshard
    _undo.append(lambda: setattr(FSDPParamGroup, "wait_for_unshard", original))


def undo() -> None:
    _undo.pop()()
