"""torchtitan: its own FSDP2 helper on its Llama debug model, two layers of it."""

import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ecosystem.training import scenario, train
from support.arms import Run, Scenario
from support.features import RELEASE

PACKAGES = ("torchtitan",)
# The first release has another helper, another model class, and leaves averages to FSDP2.
FIRST = RELEASE < (2, 13)
IMPORTS = (
    ("torchtitan.models.llama3.infra.parallelize",)
    if FIRST
    else ("torchtitan.distributed.fsdp", "torchtitan.models.llama3")
)

VOCAB = 2048


def debug_model() -> nn.Module:
    if FIRST:
        from dataclasses import replace

        from torchtitan.models.llama3 import Transformer, llama3_configs

        config = replace(llama3_configs["debugmodel"], n_layers=2, vocab_size=VOCAB)
        return Transformer(config)

    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import llama3_configs

    config = llama3_configs["debugmodel"](attn_backend="flex")
    config.layers = config.layers[:2]
    for layer in config.layers:
        # The attention that language models get needs a GPU.
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = config.build()
    model.init_states(buffer_device=torch.device("cpu"))
    return model


def helper(*mesh: int, dtype: torch.dtype = torch.float32, **options) -> Callable[[Run], None]:
    names = ("dp_replicate", "fsdp")[2 - len(mesh) :]

    def shard(run: Run) -> None:
        if FIRST:
            from torchtitan.models.llama3.infra.parallelize import apply_fsdp as apply
        else:
            from torchtitan.distributed.fsdp import apply_fsdp_to_decoder as apply

        apply(
            run.module,
            run.mesh(*mesh, names=names),
            param_dtype=dtype,
            reduce_dtype=torch.float32,
            pp_enabled=False,
            **options,
        )

    return shard


class Cast(nn.Module):
    """FSDP2's mixed precision for a plain module: parameters are cast on their way in."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.module, self.dtype = module, dtype

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        cast = {name: p.to(self.dtype) for name, p in self.module.named_parameters()}
        return torch.func.functional_call(self.module, cast, (tokens,))


def reference(dtype: torch.dtype = torch.float32) -> Callable[[Run], None]:
    """DDP where there are replicas. It averages; the helper's divide factor of 1.0 asks for sums."""

    def plain(run: Run) -> None:
        model = run.module if dtype == torch.float32 else Cast(run.module, dtype)
        if run.world > 1:
            if not FIRST:
                for parameter in run.module.parameters():
                    parameter.register_hook(lambda grad: grad * run.world)
            # Ranks begin alike, and gloo cannot send the complex buffers.
            model = DistributedDataParallel(model, init_sync=False, broadcast_buffers=False)
            run.kept["ddp"] = True
        run.forward = model

    return plain


def loss(run: Run, step: int) -> torch.Tensor:
    tokens = run.batch(step, 2, 17).mul(10000).long().remainder(VOCAB)
    logits = run.forward(tokens[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def _scenario(name: str, *mesh: int, dtype=torch.float32, **options) -> Scenario:
    kwargs = {"world": mesh[0], "replicas": mesh[0]} if len(mesh) > 1 else {}
    return scenario(
        "torchtitan", name, model=debug_model, shard=helper(*mesh, dtype=dtype, **options),
        plain=reference(dtype), steps=train(loss, steps=4), **kwargs,
    )  # fmt: skip


SCENARIOS = [
    _scenario("debug model", 1),
    _scenario("debug model, bf16", 1, dtype=torch.bfloat16),
    _scenario("debug model, never resharded", 1, reshard_after_forward_policy="never"),
    _scenario("debug model, (2, 1) mesh against DDP", 2, 1),
    _scenario("debug model, bf16, (2, 1) mesh against DDP", 2, 1, dtype=torch.bfloat16),
]
