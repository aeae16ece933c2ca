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


def load() -> None:
    for name in _LAZY:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    import torch

    # The first optimizer pulls in the compiler's decorators.
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
