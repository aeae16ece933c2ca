"""What runs in a scenario: training steps that record everything that a user could see."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from support.arms import PLAIN, Run, average_gradients


def sgd(parameters, **kwargs) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, **kwargs)


def adamw(parameters, **kwargs) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1, **kwargs)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.float().pow(2).mean() + output.float().sin().sum() * 0.1


def forward(run: Run, key: str, *inputs: Any, **kwargs: Any) -> torch.Tensor:
    """One forward; records the output and its loss, and returns the loss."""
    output = run.forward(*inputs, **kwargs)
    run.record(f"{key}/output", output)
    loss = loss_of(output)
    run.record(f"{key}/loss", loss)
    return loss


def backward(run: Run, loss: torch.Tensor, sync: bool = True) -> None:
    loss.backward()
    if run.arm == PLAIN and sync:
        settle(run)


def settle(run: Run) -> None:
    """What FSDP2 does after backward, for the plain arm: placements, an average over replicas."""
    for parameter in run.module.parameters():
        grad = parameter.grad
        if isinstance(grad, DTensor) and grad.placements != parameter.placements:
            parameter.grad = grad.redistribute(placements=parameter.placements)
    if run.scenario.replicas > 1 and not run.kept.get("ddp"):
        average_gradients(run.module, run.scenario.replicas)


def update(run: Run, key: str, set_to_none: bool = True) -> None:
    """Records gradients, steps, and records parameters."""
    run.record_gradients(key)
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=set_to_none)
    run.record_parameters(key)
    run.record_states(key)


def tokens(run: Run, step: int, *shape: int) -> torch.Tensor:
    from support.models import VOCAB

    return run.batch(step, *(shape or (2, 6))).mul(1000).long().remainder(VOCAB)


def train(
    steps: int = 3,
    *,
    micro: int = 1,
    optimizer: Callable[..., torch.optim.Optimizer] = adamw,
    inputs: Callable[[Run, int], torch.Tensor] = Run.batch,
    counted: int | None = 1,
    set_to_none: bool = True,
    before: Callable[[Run, int], None] | None = None,
    after_backward: Callable[[Run, int], None] | None = None,
    after: Callable[[Run, int], None] | None = None,
) -> Callable[[Run], None]:
    """Plain training; one step of it is counted. The callbacks make it a scenario."""

    def run_steps(run: Run) -> None:
        run.optimizer = optimizer([p for p in run.module.parameters() if p.requires_grad])
        for step in range(steps):
            if before:
                before(run, step)
            _passes(run, step, micro, inputs, counted=step == counted)
            if after_backward:
                after_backward(run, step)
            update(run, f"step {step}", set_to_none)
            if after:
                after(run, step)

    return run_steps


def _passes(
    run: Run,
    step: int,
    micro: int,
    inputs: Callable[[Run, int], torch.Tensor],
    counted: bool,
) -> None:
    for index in range(micro):
        last = index == micro - 1
        if micro > 1 and isinstance(run.module, FSDPModule):
            run.module.set_requires_gradient_sync(last)
        key = f"step {step}" if micro == 1 else f"step {step}.{index}"
        with run.count("step") if counted else nullcontext():
            loss = forward(run, key, inputs(run, step * micro + index))
            backward(run, loss, sync=last)
