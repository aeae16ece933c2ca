"""Altered copies of torch's FSDP2, made from the installed one and imported in its place.

Made at import time, in a forked child: the modules that the parent has imported are forgotten
there, and imported again through a loader that edits their source first.
"""

import ast
import importlib.machinery
import logging
import re
import sys
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support import standins, warmup

PARENT = "torch.distributed.fsdp"
FSDP2 = f"{PARENT}._fully_shard"

# From the last part of a module's name and its source to the new source.
Edit = Callable[[str, str], str]


@dataclass(frozen=True)
class Alteration:
    """What is different, and what the one warning has to say."""

    name: str
    edits: tuple[Edit, ...] = ()
    #: Modules under a new name.
    modules: dict[str, str] = field(default_factory=dict)
    #: FSDP2 is not there at all.
    missing: bool = False
    #: Words that the warning must contain; none where the alteration makes no difference to us.
    says: tuple[str, ...] = ()

    def source(self, module: str, source: str) -> str:
        for edit in self.edits:
            source = edit(module, source)
        return source


# -- edits -------------------------------------------------------------------------------------


def renamed(old: str, new: str) -> Edit:
    """A word, everywhere."""
    return lambda module, source: re.sub(rf"\b{old}\b", new, source)


def replaced(where: str, pattern: str, replacement: str) -> Edit:
    """Every place in one module that the pattern fits; there has to be one."""

    def edit(module: str, source: str) -> str:
        if module != where:
            return source
        source, count = re.subn(pattern, replacement, source)
        assert count, f"this torch's {where} has nothing like {pattern}"
        return source

    return edit


def transformed(where: str, transform: Callable[[ast.Module], None]) -> Edit:
    """One module, by its syntax tree."""

    def edit(module: str, source: str) -> str:
        if module != where:
            return source
        tree = ast.parse(source)
        transform(tree)
        return ast.unparse(ast.fix_missing_locations(tree))

    return edit


def find(tree: ast.AST, kind: type, name: str) -> Any:
    """The class or function of that name."""
    return next(n for n in ast.walk(tree) if isinstance(n, kind) and n.name == name)


# -- putting an altered copy in place ------------------------------------------------------------


# What ``standins`` does to a module that is loaded already.
_KEEPS_VERSIONS = """
from support.standins import keeping_versions
foreach_all_gather_copy_out = keeping_versions(foreach_all_gather_copy_out)
"""


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, alteration: Alteration, fullname: str, path: str):
        super().__init__(fullname, path)
        self._alteration = alteration

    def get_code(self, fullname: str) -> types.CodeType:
        tail = Path(self.path).stem
        source = self._alteration.source(tail, self.get_data(self.path).decode())
        if "def foreach_all_gather_copy_out(" in source and "_unsafe_preserve" not in source:
            source += _KEEPS_VERSIONS
        return compile(source, self.path, "exec", dont_inherit=True)


class _Finder:
    """Finds what there is in a directory that mirrors the one of the installed package."""

    def __init__(self, alteration: Alteration, mirror: Path):
        self._alteration = alteration
        self._mirror = mirror

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != PARENT and not name.startswith(FSDP2):
            return None
        path = [str(self._mirror.parent)] if name == PARENT else path
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None:
            spec.loader = _Loader(self._alteration, name, spec.origin)
        return spec


def _mirrored(source: Path, mirror: Path, alteration: Alteration) -> None:
    mirror.mkdir()
    for entry in source.iterdir():
        stem, _, suffix = entry.name.partition(".")
        if entry.is_dir():
            if entry.name != FSDP2.rpartition(".")[2] or not alteration.missing:
                _mirrored(entry, mirror / entry.name, alteration)
        elif suffix == "py":
            (mirror / f"{alteration.modules.get(stem, stem)}.py").symlink_to(entry)


_kept: list[Any] = []


def forget_fsdp2() -> None:
    """As if FSDP2 had never been imported. For a forked child: there is no way back."""
    for name, module in list(sys.modules.items()):
        if name == PARENT or name.startswith((FSDP2, "torch.distributed._composable")):
            library = vars(module).get("lib")
            if library is not None:
                library._destroy()  # its operators will be defined again
            _kept.append(sys.modules.pop(name))
    import torch

    del torch.distributed.fsdp
    vars(torch.ops).pop("fsdp", None)  # handles of operators that are gone


def put_in_place(alteration: Alteration, directory: Path) -> None:
    source = Path(sys.modules[PARENT].__file__).parent
    forget_fsdp2()
    mirror = directory / source.name
    _mirrored(source, mirror, alteration)
    sys.meta_path.insert(0, _Finder(alteration, mirror))


# -- what the plugin says -------------------------------------------------------------------------


class Heard:
    """Warnings of the plugin, and what it logged at warning level or above."""

    def __init__(self, errors: bool = False):
        self.warnings: list[str] = []
        self.logged: list[str] = []
        self._errors = errors

    @property
    def all(self) -> list[str]:
        return self.warnings + self.logged

    def __enter__(self) -> "Heard":
        heard = self

        class Handler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                heard.logged.append(record.getMessage())

        def show(message: Any, category: type, *rest: Any) -> None:
            if "fsdp_skip1" in str(message):
                heard.warnings.append(str(message))

        logging.getLogger("fsdp_skip1").addHandler(Handler(logging.WARNING))
        self._context = warnings.catch_warnings()
        self._context.__enter__()
        warnings.simplefilter("ignore")
        # As under -W error, but for torch's own warnings.
        action = "error" if self._errors else "always"
        warnings.filterwarnings(action, message="(?s).*fsdp_skip1")
        warnings.showwarning = show
        return self

    def __exit__(self, *_: object) -> None:
        self._context.__exit__(None, None, None)


def prepare() -> None:
    """In the parent, before the first child: lazy imports, and what an old torch lacks on CPU."""
    warmup.load()
    standins.install_copy_out()
    standins.install_events()
    standins.install_average()


# -- training -------------------------------------------------------------------------------------


def train(mesh: tuple[int, ...] = (1,), steps: int = 3, **options: Any) -> list[float]:
    """Losses of a small model, in the FSDP2 that is loaded now."""
    return train_more(small_model(mesh, **options), steps)


def small_model(mesh: Any = (1,), **options: Any) -> Any:
    """A mesh, or the shape of one to make, which takes far longer than the rest."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(7)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    options["mesh"] = new_mesh(mesh) if isinstance(mesh, tuple) else mesh
    for layer in model[:2]:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def new_mesh(shape: tuple[int, ...] = (1,)) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    names = ("replicate", "shard")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def train_more(model: Any, steps: int = 3) -> list[float]:
    import torch

    generator = torch.Generator().manual_seed(3)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(2, 4, generator=generator)).float().square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        losses.append(loss.item())
    return losses


def leftovers() -> list[str]:
    """Places in the loaded FSDP2 that hold something of ours."""
    found = []
    for name, module in list(sys.modules.items()):
        if name.startswith(FSDP2):
            for key, value in list(vars(module).items()):
                if _is_ours(value):
                    found.append(f"{name}.{key}")
                if isinstance(value, type) and value.__module__.startswith(FSDP2):
                    found += [f"{name}.{key}.{k}" for k, v in vars(value).items() if _is_ours(v)]
    return sorted(set(found))


def _is_ours(value: Any) -> bool:
    return type(value).__module__.startswith("fsdp_skip1")
