"""Like msprobe: hooks a collective, and brings it into the module by reloading that."""

import functools
import importlib
from typing import Any

from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group

calls = 0
_saved: list[Any] = []


def install() -> None:
    original = collectives.foreach_reduce
    _saved.append(original)

    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        global calls
        calls += 1
        return original(*args, **kwargs)

    collectives.foreach_reduce = hooked
    importlib.reload(param_group)


def undo() -> None:
    collectives.foreach_reduce = _saved.pop()
    importlib.reload(param_group)
