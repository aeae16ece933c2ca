"""What the scenarios share: tokens, and steps that record everything that a user could see."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from support.arms import PLAIN, PLUGIN, STOCK, Run, Scenario, local
from support.steps import settle

VOCAB = 64
ARMS = (STOCK, PLUGIN)


def scenario(library: str, name: str, **kwargs: Any) -> Scenario:
    # CommDebugMode follows one forward and one backward; the dispatcher sees all collectives.
    return Scenario(name=f"{library}: {name}", arms=ARMS, timeout=180.0, comm_mode=False, **kwargs)


def token_ids(run: Run, step: int, *shape: int) -> torch.Tensor:
    return run.batch(step, *(shape or (2, 8))).mul(1000).long().remainder(VOCAB)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def language_loss(run: Run, step: int) -> torch.Tensor:
    """The loss as Hugging Face models give it."""
    ids = token_ids(run, step)
    return run.forward(input_ids=ids, labels=ids).loss


def train(
    loss: Callable[[Run, int], torch.Tensor] = language_loss,
    *,
    steps: int = 3,
    micro: int = 1,
    between: Callable[[Run, int], None] | None = None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
) -> Callable[[Run], None]:
    """Steps with clipped gradients; the second is counted. ``between`` runs after each."""

    def run_steps(run: Run) -> None:
        run.optimizer = optimizer(run.module)
        for step in range(steps):
            if step == 1:
                with run.count("step"):
                    passes(run, loss, step, micro)
            else:
                passes(run, loss, step, micro)
            norm = nn.utils.clip_grad_norm_(run.module.parameters(), 1.0)
            run.record(f"{step}/norm", norm.full_tensor() if isinstance(norm, DTensor) else norm)
            run.record_gradients(str(step))
            run.optimizer.step()
            run.optimizer.zero_grad()
            if between:
                between(run, step)
        record_parameters(run, "end")

    return run_steps


def record_parameters(run: Run, key: str) -> None:
    """Tensor subclasses by what they hold: two of one value may be packed differently."""
    for name, parameter in run.module.named_parameters():
        for inner, tensor in _leaves(local(parameter.detach())):
            run.record(f"{key}/{name}{inner}", tensor)
    run.record_all(f"{key}/buffer", dict(run.module.named_buffers()))


def _leaves(tensor: torch.Tensor, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if not hasattr(tensor, "__tensor_flatten__"):
        yield path, tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _leaves(getattr(tensor, name), f"{path}.{name}")


def passes(run: Run, loss: Callable[[Run, int], torch.Tensor], step: int, micro: int) -> None:
    for index in range(micro):
        if micro > 1 and run.fsdp:
            run.module.set_requires_gradient_sync(index == micro - 1)
        value = loss(run, step * micro + index)
        run.record(f"{step}.{index}/loss", value)
        value.backward()
    if run.arm == PLAIN:
        settle(run)
