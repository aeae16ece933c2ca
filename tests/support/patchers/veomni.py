"""Like VeOmni, Automodel, ATorch and Miles: copies of what runs after backward, and closures."""

from typing import Any

from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from support.patchers import copied

calls = 0
_COPIES = (
    (FSDPParam, "to_accumulated_grad_if_needed"),  # until 2.14
    (FSDPState, "_root_post_backward_final_callback"),
    (FSDPState, "_post_forward"),
    (FSDPState, "_pre_forward"),
    (FSDPParamGroup, "__init__"),
    (FSDPParamGroup, "post_backward"),
)
_saved: list[tuple[type, str, Any]] = []


def _replace(owner: type, name: str, function: Any) -> None:
    _saved.append((owner, name, vars(owner)[name]))
    setattr(owner, name, function)


def install() -> None:
    for owner, name in _COPIES:
        if name in vars(owner):
            _replace(owner, name, copied(vars(owner)[name], globals()))
    original = FSDPParamGroup.wait_for_unshard

    def patched_wait_for_unshard(group: Any) -> None:  # another name than in torch
        global calls
        calls += 1
        return original(group)

    _replace(FSDPParamGroup, "wait_for_unshard", patched_wait_for_unshard)


def undo() -> None:
    while _saved:
        setattr(*_saved.pop())
