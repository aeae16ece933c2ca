"""torchao: quantized and low-precision training, whose weights bring FSDP2's extension hooks."""

from collections.abc import Callable

import torch
from torch import nn

from ecosystem.training import scenario, train
from support.arms import Run, Scenario
from support.steps import loss_of

PACKAGES = ("torchao",)
IMPORTS = ("torchao.float8", "torchao.prototype.quantized_training", "torchao.quantization")

DIM = 32  # float8 wants multiples of 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 2 * DIM, bias=False)
        self.down = nn.Linear(2 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def stack() -> nn.Module:
    return nn.Sequential(Block(), Block(), nn.Linear(DIM, 16))


def quantized(config: Callable[[], object]) -> Callable[[Run], None]:
    def prepare(run: Run) -> None:
        from torchao.quantization import quantize_

        quantize_(run.module, config())

    return prepare


def int8_weight_only():
    from torchao.prototype import quantized_training

    return quantized_training.int8_weight_only_quantized_training()


def int8_mixed_precision():
    from torchao.prototype import quantized_training

    return quantized_training.int8_mixed_precision_training()


def bitnet():
    from torchao.prototype import quantized_training

    return quantized_training.bitnet_training()


def bitnet_scales(run: Run, step: int) -> None:
    from torchao.prototype.quantized_training import precompute_bitnet_scale_for_fsdp

    if run.fsdp:
        precompute_bitnet_scale_for_fsdp(run.module)


def float8(run: Run) -> None:
    """``emulate``: a CPU has no float8 matrix product; the values are float8 all the same."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    convert_to_float8_training(run.module, config=config)


def float8_scales(run: Run, step: int) -> None:
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    if run.fsdp:
        precompute_float8_dynamic_scale_for_fsdp(run.module)


def shard_on(*mesh: int) -> Callable[[Run], None]:
    def shard(run: Run) -> None:
        run.fully_shard(*list(run.module)[:2], run.module, mesh=run.mesh(*mesh))

    return shard


def loss(run: Run, step: int) -> torch.Tensor:
    return loss_of(run.forward(run.batch(step, 4, DIM)))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    # torchao's int8 weights round stochastically into place: an optimizer with a state of their
    # kind would be torchao's own, which compiles its step.
    return torch.optim.SGD(model.parameters(), lr=0.01)


def _scenario(name: str, prepare, *, optimizer=None, between=None, **kwargs) -> Scenario:
    options = {"optimizer": optimizer} if optimizer else {}
    return scenario(
        "torchao", name, model=stack, prepare=prepare, shard=kwargs.pop("shard", shard_on(1)),
        steps=train(loss, between=between, **options), **kwargs,
    )  # fmt: skip


SCENARIOS = [
    _scenario("int8 weight-only", quantized(int8_weight_only), optimizer=sgd,
              fault="extension with several tensors"),
    _scenario("int8 mixed precision", quantized(int8_mixed_precision)),
    _scenario("int8 mixed precision, (2, 1) mesh", quantized(int8_mixed_precision),
              shard=shard_on(2, 1), world=2, replicas=2),
    _scenario("bitnet", quantized(bitnet)),
    _scenario("bitnet, scales for FSDP2", quantized(bitnet), between=bitnet_scales),
    _scenario("float8 gathered", float8),
    _scenario("float8 gathered, scales for FSDP2", float8, between=float8_scales),
    _scenario("float8 gathered, (2, 1) mesh", float8, shard=shard_on(2, 1), world=2, replicas=2,
              between=float8_scales),
]  # fmt: skip
