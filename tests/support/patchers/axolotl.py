"""Like axolotl: source of two methods of ``FSDPParam`` fetched, edited and executed."""

import inspect
import textwrap
from typing import Any

from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

calls = 0
_METHODS = ("_init_sharded_param", "init_unsharded_param")


def count() -> None:
    global calls
    calls += 1


def _edited(name: str) -> Any:
    source = textwrap.dedent(inspect.getsource(getattr(FSDPParam, name)))
    head, body = source.split("\n", 1)
    while not head.rstrip().endswith(":"):  # decorators, and a signature on several lines
        line, body = body.split("\n", 1)
        head += "\n" + line
    source = f"{head}\n    count()\n{body}".replace(f"def {name}(", f"def patched{name}(", 1)
    names = {**vars(_fsdp_param), "count": count}
    exec(source, names)
    return names[f"patched{name}"]


def install() -> None:
    for name in _METHODS:
        setattr(FSDPParam, f"_original{name}", vars(FSDPParam)[name])
        setattr(FSDPParam, name, _edited(name))


def undo() -> None:
    for name in _METHODS:
        setattr(FSDPParam, name, vars(FSDPParam)[f"_original{name}"])
        delattr(FSDPParam, f"_original{name}")
