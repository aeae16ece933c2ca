"""Like torch_musa: at the first ``fully_shard``, copies in place of methods, and ``__code__``."""

import functools
import inspect
from typing import Any

import torch.distributed.fsdp
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from support.patchers import copied

calls = 0
_fully_shard = torch.distributed.fsdp.fully_shard
_methods = ("unshard", "wait_for_unshard", "post_backward")
_saved: dict[str, Any] = {}


def _setup() -> None:
    gather = inspect.unwrap(collectives.foreach_all_gather)
    _saved["code"] = gather.__code__
    gather.__code__ = copied(gather, globals()).__wrapped__.__code__
    for name in _methods:
        _saved[name] = vars(FSDPParamGroup)[name]
        setattr(FSDPParamGroup, name, copied(_saved[name], globals()))


@functools.wraps(_fully_shard)
def _first(*args: Any, **kwargs: Any) -> Any:
    global calls
    calls += 1
    if not _saved:
        _setup()
    return _fully_shard(*args, **kwargs)


def install() -> None:
    torch.distributed.fsdp.fully_shard = _first


def undo() -> None:
    torch.distributed.fsdp.fully_shard = _fully_shard
    if _saved:
        inspect.unwrap(collectives.foreach_all_gather).__code__ = _saved.pop("code")
        for name in _methods:
            setattr(FSDPParamGroup, name, _saved.pop(name))
