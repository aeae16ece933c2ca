"""Wraps what the plugin replaces or goes around to save overhead, and counts the calls."""

import functools
from collections import Counter
from typing import Any

from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

calls = 0
counts: Counter[str] = Counter()
_PLACES = (
    (FSDPParam, "to_sharded"),
    (FSDPParam, "to_unsharded"),
    (FSDPParam, "free_unsharded_param"),
    (FSDPParam, "to_sharded_dtensor"),
    (FSDPParamGroup, "_to_sharded"),
    (FSDPParamGroup, "_to_unsharded"),
    (FSDPParamGroup, "_register_post_backward_hook"),
    (FSDPParamGroup, "pre_backward"),
    (FSDPParamGroup, "post_backward"),
    (FSDPState, "_pre_backward"),
    (FSDPState, "_root_pre_forward"),
    (param_group, "record_function"),
)
_saved: list[tuple[Any, str, Any]] = []


def _counted(name: str, original: Any) -> Any:
    @functools.wraps(original, updated=())
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        global calls
        calls += 1
        counts[name] += 1
        return original(*args, **kwargs)

    return wrapper


def install() -> None:
    for owner, name in _PLACES:
        original = vars(owner)[name]
        _saved.append((owner, name, original))
        setattr(owner, name, _counted(name, getattr(owner, name)))


def undo() -> None:
    while _saved:
        setattr(*_saved.pop())
