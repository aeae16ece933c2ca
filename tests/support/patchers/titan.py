"""Like torchtitan-npu: wraps what it saw on import, whoever has patched since; checks signatures."""

from inspect import signature
from typing import Any

from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group

calls = 0

_ORIGINAL_REDUCE: Any = collectives.foreach_reduce
_ORIGINAL_UNSHARD: Any = param_group.FSDPParamGroup.unshard
_ORIGINAL_WAIT: Any = param_group.FSDPParamGroup.wait_for_unshard


def _is_special(group: Any) -> bool:
    return any(fsdp_param.offload_to_cpu for fsdp_param in group.fsdp_params)


def _unshard(self: Any, async_op: bool = False) -> None:
    global calls
    calls += 1
    if _is_special(self) and self._all_gather_result is None and not self.is_unsharded:
        self.prefetched = True
    return _ORIGINAL_UNSHARD(self, async_op)


def _wait_for_unshard(self: Any) -> None:
    if _is_special(self):
        vars(self).pop("prefetched", None)
    return _ORIGINAL_WAIT(self)


def _reduce(*args: Any, **kwargs: Any) -> Any:
    return _ORIGINAL_REDUCE(*args, **kwargs)


def install() -> None:
    expected = {_ORIGINAL_UNSHARD: ("self", "async_op"), _ORIGINAL_WAIT: ("self",)}
    for function, names in expected.items():
        if tuple(signature(function).parameters) != names:
            raise RuntimeError(f"unsupported signature {signature(function)}")
    if "fsdp_params" not in signature(_ORIGINAL_REDUCE).parameters:
        raise RuntimeError(f"unsupported signature {signature(_ORIGINAL_REDUCE)}")
    collectives.foreach_reduce = param_group.foreach_reduce = _reduce
    param_group.FSDPParamGroup.unshard = _unshard
    param_group.FSDPParamGroup.wait_for_unshard = _wait_for_unshard


def undo() -> None:
    collectives.foreach_reduce = param_group.foreach_reduce = _ORIGINAL_REDUCE
    param_group.FSDPParamGroup.unshard = _ORIGINAL_UNSHARD
    param_group.FSDPParamGroup.wait_for_unshard = _ORIGINAL_WAIT
