"""Work on a device's streams is in order: on the stand-in device, with PyTorch's own sanitizer."""

import pytest
import torch
from functools import partial
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from support import models
from support.extensions import HighAndLow, OneTensorNew, Quantized
from support.features import missing
from support.ranks import run_ranks
from support.streams import Stream
from support.trials import BF16, OFFLOAD, Case, Trial, train


def coated(kind):
    def build():
        module = models.Stack(depth=3)
        for layer in module.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.weight = torch.nn.Parameter(kind(layer.weight.data))
        return module

    return build


def prefetching(forward: int, backward: int):
    """Each block asks for the next ones, and for the ones before it in backward."""

    def drive(trial: Trial) -> None:
        blocks = list(trial.module.blocks)
        for index, block in enumerate(blocks):
            if forward:
                block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + forward])
            if backward:
                before = blocks[max(0, index - backward) : index]
                block.set_modules_to_backward_prefetch(before[::-1])
        train(trial)

    return drive


def microbatches(trial: Trial) -> None:
    """Gradients add up on the host."""
    for step in range(3):
        trial.backward(step)
    trial.update()


def without_sync(trial: Trial) -> None:
    for step in range(4):
        trial.module.set_requires_gradient_sync(step % 2 == 1)
        trial.backward(step)
        if step % 2:
            trial.update()


def without_all_reduce(trial: Trial) -> None:
    for step in range(6):
        trial.module.set_requires_all_reduce(step % 3 == 2)
        trial.backward(step)
        if step % 3 == 2:
            trial.update()


def optimizer_beside(trial: Trial) -> None:
    side = torch.cuda.Stream()
    for step in range(3):
        trial.backward(step)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            trial.optimizer.step()
            trial.optimizer.zero_grad(set_to_none=False)
            event = side.record_event()
        trial.module.set_post_optim_event(event)


def on_a_stream_of_its_own(trial: Trial) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        train(trial)

def optimizer_in_hooks(trial: Trial) -> None:
    def step(parameter):
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad
        parameter.grad = None
    for p in trial.module.parameters():
        p.register_post_accumulate_grad_hook(step)
    for step in range(2):
        trial.backward(step)


REDUCE32 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
CASES = [
    Case(name="shared"),
    Case(name="cast", options={"mp_policy": BF16}),
    Case(name="private copies", zero_copy=False),
    Case(name="offloaded", options={"offload_policy": OFFLOAD}),
    Case(name="offloaded, cast", options={"offload_policy": OFFLOAD, "mp_policy": REDUCE32}),
    Case(name="offloaded, unpinned", options={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    Case(name="offloaded, kept for backward", options={"offload_policy": OFFLOAD, "reshard_after_forward": False}),
    Case(name="offloaded, prefetch 1", options={"offload_policy": OFFLOAD}, drive=prefetching(1, 1)),
    Case(name="offloaded, prefetch 2", options={"offload_policy": OFFLOAD}, drive=prefetching(2, 2)),
    Case(name="offloaded, microbatches", options={"offload_policy": OFFLOAD}, drive=microbatches),
    Case(name="offloaded, without sync", options={"offload_policy": OFFLOAD}, drive=without_sync),
    Case(name="offloaded, hooks", options={"offload_policy": OFFLOAD}, drive=optimizer_in_hooks),
    Case(name="offloaded, own stream", options={"offload_policy": OFFLOAD}, drive=on_a_stream_of_its_own),
    Case(name="offloaded extension 1", model=coated(OneTensorNew), options={"offload_policy": OFFLOAD}),
    Case(name="offloaded extension 2", model=coated(HighAndLow), options={"offload_policy": OFFLOAD}),
    Case(name="offloaded extension 3", model=coated(Quantized), options={"offload_policy": OFFLOAD}),
    Case(name="replicas", mesh=(2, 1), world=2),
    Case(name="replicas, cast", mesh=(2, 1), world=2, options={"mp_policy": REDUCE32}),
    Case(name="replicas, without all-reduce", mesh=(2, 1), world=2, drive=without_all_reduce),
    Case(name="replicas, offloaded", mesh=(2, 1), world=2, options={"offload_policy": OFFLOAD}),
    Case(name="replicas, offloaded, cast", mesh=(2, 1), world=2, options={"offload_policy": OFFLOAD, "mp_policy": REDUCE32}),
    Case(name="optimizer beside", drive=optimizer_beside),
    Case(name="optimizer beside, cast", drive=optimizer_beside, options={"mp_policy": BF16}),
    Case(name="optimizer beside, replicas", drive=optimizer_beside, mesh=(2,1), world=2),
]


@pytest.mark.usefixtures("ledger")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_in_order(case):
    for plugin, stock in run_ranks(lambda rank: (case.run(rank), case.run(rank, plugin=False)), case.world):
        print("STOCK", len(stock.races), stock.races[:1])
        print(plugin.peak, stock.peak, plugin.host_waits, stock.host_waits)
        assert not plugin.races, "\n".join(plugin.races[:4])
        assert plugin.values == stock.values
