"""Keeps the originals on an object that its closures hold."""

from typing import Any

from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

calls = 0


class Profiler:
    def install(self) -> None:
        profiler = self
        self.original_unshard = FSDPParamGroup.unshard
        self.original_wait = FSDPParamGroup.wait_for_unshard

        def unshard(group: Any, async_op: bool = False) -> None:
            global calls
            calls += 1
            return profiler.original_unshard(group, async_op)

        def wait_for_unshard(group: Any) -> None:
            return profiler.original_wait(group)

        FSDPParamGroup.unshard = unshard
        FSDPParamGroup.wait_for_unshard = wait_for_unshard

    def uninstall(self) -> None:
        FSDPParamGroup.unshard = self.original_unshard
        FSDPParamGroup.wait_for_unshard = self.original_wait


_profiler = Profiler()
install, undo = _profiler.install, _profiler.uninstall
