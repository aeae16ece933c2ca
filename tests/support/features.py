"""What this torch release can do. The only place in the tests that asks.

Nearly everything is found by looking; ``RELEASE`` serves the few faults of stock torch that show
in no attribute or signature (see ``faults``).
"""

import importlib
import importlib.util
import inspect
from functools import cache

import pytest
import torch

RELEASE = tuple(int(x) for x in torch.__version__.split("+")[0].split(".")[:2])
proven_release = pytest.mark.skipif(RELEASE < (2, 7), reason="2.6 keeps the smaller trims alone")


def _module(name: str):
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _fsdp_method(name: str) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return hasattr(FSDPModule, name)


def _fully_shard_takes(name: str) -> bool:
    from torch.distributed.fsdp import fully_shard

    return name in inspect.signature(fully_shard).parameters


def _fsdp_common_has(name: str) -> bool:
    module = _module("torch.distributed.fsdp._fully_shard._fsdp_common")
    return hasattr(module, name)


_CHECKS = {
    "cpu default mesh": lambda: torch._C._get_accelerator().type == "cpu",
    "replicate_with_fsdp": lambda: _replicate_is_public(),
    "replicate mesh argument": lambda: _replicate_is_public(),
    "per-parameter meshes": lambda: _fsdp_common_has("ShardPlacementResult"),
    "dp_mesh_dims": lambda: _fully_shard_takes("dp_mesh_dims"),
    "reshard_after_forward=None": lambda: _reshards_by_default(),
    "ignored_params": lambda: _fully_shard_takes("ignored_params"),
    "share_comm_ctx": lambda: hasattr(_module("torch.distributed.fsdp"), "share_comm_ctx"),
    "compiled autograd": lambda: _fsdp_common_has("compiled_autograd_enabled"),
    # 2.6 has it, and FSDP2's final callback fails under it.
    "recorded compiled autograd": lambda: has("compiled autograd") and RELEASE >= (2, 7),
    "compiled autograd module": lambda: _module("torch._dynamo.compiled_autograd") is not None,
    "reduce divide factor": lambda: _divide_factor() is not None,
    "gloo averages": lambda: RELEASE >= (2, 8),
    "mem tracker": lambda: _module("torch.distributed._tools.fsdp2_mem_tracker") is not None,
    "grad_dtype": lambda: hasattr(torch.Tensor, "grad_dtype"),
}


def _replicate_is_public() -> bool:
    """The first release of the module had no default mesh and its own state classes."""
    module = _module("torch.distributed._composable.replicate_with_fsdp")
    return module is not None and hasattr(module, "ReplicateModule")


def _reshards_by_default() -> bool:
    """Later releases take None for: as is best for a root, or for a child."""
    from torch.distributed.fsdp import fully_shard

    parameters = inspect.signature(fully_shard).parameters
    return parameters["reshard_after_forward"].default is None


def _divide_factor() -> str | None:
    for name in ("set_gradient_divide_factor", "set_reduce_scatter_divide_factor"):
        if _fsdp_method(name):
            return name
    return None


@cache
def has(feature: str) -> bool:
    """``feature`` is a key of the checks, or ``FSDPModule.<method>``."""
    if feature.startswith("FSDPModule."):
        return _fsdp_method(feature.split(".", 1)[1])
    return bool(_CHECKS[feature]())


def missing(features) -> list[str]:
    return [feature for feature in features if not has(feature)]


def set_divide_factor(module, factor: float) -> None:
    """Older releases know the setter under another name."""
    getattr(module, _divide_factor())(factor)
