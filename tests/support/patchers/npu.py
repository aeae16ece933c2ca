"""Like torch_npu: a copy of ``wait_for_unshard`` and of ``finalize_backward``, some wrappers."""

from typing import Any

from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from support.patchers import copied

calls = 0
_saved: dict[str, Any] = {}


def _counted(original: Any) -> Any:
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        global calls
        calls += 1
        return original(self, *args, **kwargs)

    return wrapper


def install() -> None:
    for name in ("finalize_backward", "wait_for_unshard"):
        _saved[name] = vars(FSDPParamGroup)[name]
        setattr(FSDPParamGroup, name, copied(_saved[name], globals()))
    for name in ("__init__", "post_forward", "post_backward"):
        _saved[name] = vars(FSDPParamGroup)[name]
        setattr(FSDPParamGroup, name, _counted(getattr(FSDPParamGroup, name)))


def undo() -> None:
    for name, original in _saved.items():
        setattr(FSDPParamGroup, name, original)
