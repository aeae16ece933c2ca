"""Stock torch is wrong here: the plugin follows the plain module, and stock is expected to fail."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from support import features, models, shards
from support.arms import PLAIN, Run, Scenario, average_gradients
from support.results import arm_tests
from support.steps import backward, forward, loss_of, sgd, update

pytestmark = pytest.mark.scenario

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


# - Inference mode before, between and after training


def inference(*kinds: str):
    """A sequence of training steps, inferences and loads."""

    def steps(run: Run) -> None:
        run.optimizer = sgd(run.module.parameters())
        for index, kind in enumerate(kinds):
            key = f"{index} {kind}"
            if kind == "train":
                backward(run, forward(run, key, run.batch(index)))
                update(run, key)
            elif kind == "load":
                with torch.no_grad():
                    weights = {k: v * 0.5 for k, v in run.module.state_dict().items()}
                run.module.load_state_dict(weights)
            else:
                with torch.inference_mode():
                    output = run.forward(run.batch(index))
                run.record(key, output.clone())

    return steps


# - Gradient divide factors


def divided(
    factor: float,
    *mesh: int,
    force_sum: bool = False,
    dtype: torch.dtype = torch.float32,
    micro: int = 1,
):
    def shard(run: Run) -> None:
        shards.blocks(*mesh)(run)
        for module in run.fsdp_modules():
            features.set_divide_factor(module, factor)
            if force_sum:
                module.set_force_sum_reduction_for_comms(True)

    def steps(run: Run) -> None:
        run.optimizer = sgd(run.module.parameters())
        for step in range(2):
            for index in range(micro):
                if run.fsdp:
                    run.module.set_requires_gradient_sync(index == micro - 1)
                x = run.batch(micro * step + index).to(dtype)
                loss = forward(run, f"step {step}.{index}", x)
                loss.backward()
            if run.arm == PLAIN:
                # The sum over replicas, divided once; in fp16 half before and half after, which
                # is what keeps a sum in range.
                before = factor**0.5 if dtype == torch.float16 and run.world > 1 else 1.0
                for parameter in run.module.parameters():
                    parameter.grad.div_(before)
                if run.world > 1:
                    average_gradients(run.module, 1)
                for parameter in run.module.parameters():
                    parameter.grad.div_(factor / before)
            update(run, f"step {step}")

    return {"shard": shard, "steps": steps, "model": lambda: models.Stack().to(dtype)}


# - Gradients that arrive late


class Late(nn.Module):
    """Only the last microbatch goes through the second branch."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([models.Block(), models.Block()])
        self.late = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        return self.blocks[1](x) if self.late else x


def late_gradient(run: Run) -> None:
    run.optimizer = sgd(run.module.parameters())
    for step in range(2):
        for index in range(3):
            run.module.late = index == 2
            if run.fsdp:
                run.module.set_requires_gradient_sync(index == 2)
            output = run.forward(run.batch(3 * step + index))
            run.record(f"step {step}.{index}/output", output)
            loss_of(output).backward()
        update(run, f"step {step}")


def one_group(run: Run) -> None:
    fully_shard(run.module, mesh=run.mesh(1), mp_policy=MIXED)


TWICE, NEVER = "divide factor applied twice", "divide factor not applied"
FORCE_SUM = "FSDPModule.set_force_sum_reduction_for_comms"

SCENARIOS = [
    *(
        Scenario(name=f"inference mode: {', '.join(kinds)}", shard=shards.blocks(1),
                 steps=inference(*kinds), fault="inference mode before training")
        for kinds in (
            ("infer", "train"),
            ("infer", "infer", "train", "infer", "train"),
        )
    ),
    Scenario(name="inference mode first, bf16", steps=inference("infer", "train", "train"),
             shard=shards.blocks(1, mp_policy=MIXED), plain=shards.mixed_by_hand(MIXED),
             fault="inference mode before training"),
    Scenario(name="inference mode first, kept after forward",
             steps=inference("infer", "train", "infer", "train"),
             shard=shards.blocks(1, reshard_after_forward=False),
             fault="inference mode before training"),
    Scenario(name="inference mode after training", shard=shards.blocks(1),
             steps=inference("train", "infer", "train", "infer", "load", "infer", "train")),
    Scenario(name="inference mode alone", shard=shards.blocks(1),
             steps=inference("infer", "load", "infer"), fault="inference mode alone"),
    # Divide factors
    Scenario(name="divide factor 4, fp32", fault=NEVER, **divided(4.0, 1)),
    Scenario(name="divide factor 4, fp32, accumulation", fault=NEVER, **divided(4.0, 1, micro=3)),
    Scenario(name="divide factor 1, fp32", **divided(1.0, 1)),
    Scenario(name="divide factor 4, fp16", fault=TWICE, **divided(4.0, 1, dtype=torch.float16)),
    Scenario(name="divide factor 4, bf16", fault=NEVER, **divided(4.0, 1, dtype=torch.bfloat16)),
    Scenario(name="divide factor 4, forced sum", fault=TWICE, needs=(FORCE_SUM,),
             **divided(4.0, 1, force_sum=True)),
    Scenario(name="divide factor 1, forced sum", needs=(FORCE_SUM,),
             **divided(1.0, 1, force_sum=True)),
    Scenario(name="divide factor 4, forced sum, (2, 1)", world=2, replicas=2,
             fault="divide factor applied twice to replicas", needs=(FORCE_SUM,),
             **divided(4.0, 2, 1, force_sum=True)),
    Scenario(name="divide factor 1, forced sum, (2, 1)", world=2, replicas=2, needs=(FORCE_SUM,),
             **divided(1.0, 2, 1, force_sum=True)),
    Scenario(name="divide factor 4, fp16, (2, 1)", world=2, replicas=2,
             fault="divide factor applied twice to replicas",
             **divided(4.0, 2, 1, dtype=torch.float16)),
    # Late gradients
    Scenario(name="gradient that first arrives on the last microbatch", model=Late,
             shard=one_group, plain=shards.mixed_by_hand(MIXED), steps=late_gradient,
             fault="gradient that arrives late"),
]  # fmt: skip


@arm_tests(SCENARIOS)
def test_scenario(scenario: Scenario, arm: str, ledger) -> None:
    ledger.judge(scenario, arm)
