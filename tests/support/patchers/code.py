"""``__code__`` of the methods themselves swapped: the functions on the class stay who they are."""

import inspect
from typing import Any

from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from support.patchers import copied

calls = 0
_saved: dict[str, Any] = {}


def install() -> None:
    for name in ("unshard", "wait_for_unshard"):
        function = inspect.unwrap(getattr(FSDPParamGroup, name))
        _saved[name] = function, function.__code__
        function.__code__ = inspect.unwrap(copied(function, globals())).__code__


def undo() -> None:
    for function, code in _saved.values():
        function.__code__ = code
