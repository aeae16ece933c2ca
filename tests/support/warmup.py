"""Imports that torch makes lazily, made once here instead of in every forked rank."""

import contextlib
import importlib

_LAZY = (
    "torch._dynamo",
    "torch._dynamo.compiled_autograd",
    "torch._functorch.pyfunctorch",
    "torch.distributed._composable.checkpoint_activation",
    "torch.distributed._composable.replicate_with_fsdp",
    "torch.distributed._tools.fsdp2_mem_tracker",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.debug",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel.distributed",
    "torch.utils.checkpoint",
)


_COMPILER = (
    "torch._dynamo.backends.debugging",
    "torch._dynamo.convert_frame",
    "torch._functorch.aot_autograd",
    "torch._inductor.compile_fx",
    "torch.fx.experimental.symbolic_shapes",
)


def _load(names: tuple[str, ...]) -> None:
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def load_compiler() -> None:
    _load(_COMPILER)


def load() -> None:
    _load(_LAZY)
    import torch

    # The first optimizer pulls in the compiler's decorators.
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
