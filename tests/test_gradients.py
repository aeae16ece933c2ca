"""Where ``post_backward`` comes from: how blocks are wired must not show in any result."""

import gc
import operator
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support import models, warmup
from support.arms import local, seed_everything
from support.features import proven_release
from support.ranks import with_plugin
from support.shards import shard_blocks
from torch import nn
from torch.distributed.fsdp import fully_shard

pytestmark = proven_release

Blocks = nn.ModuleList
Tensor = torch.Tensor


@pytest.fixture(scope="module", autouse=True)
def prepared():
    warmup.load()


# -- wirings: each takes four blocks and an input, and gives what the loss is made of -------------


def chain(blocks: Blocks, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def operators_between(blocks: Blocks, x: Tensor) -> Tensor:
    for block in blocks:
        x = torch.tanh(block(x)) * 1.5
    return x


def residuals_outside(blocks: Blocks, x: Tensor) -> Tensor:
    for block in blocks:
        x = x * 0.3 + block(x)
    return x


def used_before(blocks: Blocks, x: Tensor) -> Tensor:
    x = blocks[0](x)
    return torch.sin(x) + blocks[2](blocks[1](x)) + blocks[3](x)


def used_by_two(blocks: Blocks, x: Tensor) -> Tensor:
    x = blocks[0](x)
    return blocks[3](blocks[1](x) * blocks[2](x))


def same_block_twice(blocks: Blocks, x: Tensor) -> Tensor:
    x = blocks[0](x)
    y = blocks[1](x) - blocks[1](x).cos()
    return blocks[2](blocks[1](y)) + blocks[3](x)


def views(blocks: Blocks, x: Tensor) -> Tensor:
    first, second = blocks[0](x).chunk(2)
    x = torch.cat([blocks[1](first), blocks[2](second)])
    return blocks[3](x[:, :])


def written_to(blocks: Blocks, x: Tensor) -> Tensor:
    x = blocks[0](x)
    x = blocks[1](x.mul_(0.5))
    y = blocks[2](x)
    return blocks[3](y.mul_(2.0)) + y


def cut(blocks: Blocks, x: Tensor) -> Tensor:
    x = blocks[1](blocks[0](x))
    y = blocks[2](x.detach().requires_grad_())
    return blocks[3](x.detach_().requires_grad_()) + y


def unused(blocks: Blocks, x: Tensor) -> Tensor:
    x = blocks[0](x)
    blocks[1](x)
    return blocks[3](x)


def frozen_start(blocks: Blocks, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = blocks[0](x)
    return blocks[3](blocks[2](blocks[1](x)))


def recomputed(blocks: Blocks, x: Tensor) -> Tensor:
    from torch.utils.checkpoint import checkpoint

    for reentrant, block in zip((False, True, False, False), blocks):
        x = checkpoint(block, x, use_reentrant=reentrant) + 0.1 * x
    return x


def gradient_inside(blocks: Blocks, x: Tensor) -> Tensor:
    """A block's own gradient with respect to its input, as models of energies take it."""

    def energy(block: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (x,) = args
        (slope,) = torch.autograd.grad(torch.tanh(block.up(block.norm(x))).sum(), x)
        return (x + slope,)

    handle = blocks[2].register_forward_pre_hook(energy)
    try:
        return chain(blocks, x)
    finally:
        handle.remove()


def gradient_outside(blocks: Blocks, x: Tensor) -> Tensor:
    """A penalty on an activation: a backward to it that does not come by the block behind."""
    x = blocks[1](blocks[0](x))
    y = blocks[3](blocks[2](x))
    (slope,) = torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)
    return torch.cat([y, slope])


WIRINGS = [
    chain,
    operators_between,
    residuals_outside,
    used_before,
    used_by_two,
    same_block_twice,
    views,
    written_to,
    cut,
    unused,
    frozen_start,
    gradient_inside,
    gradient_outside,
    recomputed,
]


class Wired(nn.Module):
    def __init__(self, wiring: Callable[[Blocks, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(models.Block() for _ in range(4))
        self.wiring = wiring

    def forward(self, x: Tensor) -> Tensor:
        return self.wiring(self.blocks, x)


def built(wiring: Callable[[Blocks, Tensor], Tensor], fsdp: bool) -> Wired:
    seed_everything()
    module = Wired(wiring)
    if fsdp:
        shard_blocks(module)
    return module


def settled() -> Wired:
    """A chain after some steps, whose groups decide nothing any more."""
    module = built(chain, fsdp=True)
    for step in range(3):
        module(batch(step)).sum().backward()
    return module


def batch(step: int) -> Tensor:
    return torch.randn(6, models.DIM, generator=torch.Generator().manual_seed(step))


def trained(wiring: Callable[[Blocks, Tensor], Tensor], fsdp: bool) -> list[Tensor]:
    """All losses, gradients and parameters of some steps; the last two backwards run twice."""
    module = built(wiring, fsdp)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    found: list[Tensor] = []
    for step in range(6):
        x = batch(step).requires_grad_()
        loss = module(x).pow(2).sum()
        twice = step > 3 and wiring is not cut
        loss.backward(retain_graph=twice)
        if twice:
            loss.backward()
        grads = [p.grad for p in module.parameters()]
        found += [loss.detach(), *(local(g).clone() for g in (*grads, x.grad) if g is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return found + [local(p).detach().clone() for p in module.parameters()]


@pytest.mark.parametrize("wiring", WIRINGS, ids=lambda wiring: wiring.__name__)
def test_wiring(wiring: Callable[[Blocks, Tensor], Tensor]) -> None:
    """Bit for bit what stock finds, and plain, but for the order in which plain sums gradients."""

    def body() -> None:
        import fsdp_skip1

        ours = trained(wiring, fsdp=True)
        plain = trained(wiring, fsdp=False)
        assert len(ours) == len(plain)
        for mine, other in zip(ours, plain):
            torch.testing.assert_close(mine, other, rtol=2e-3, atol=2e-3)
        if wiring in (chain, operators_between, frozen_start):
            assert all(map(torch.equal, ours, plain))
        with fsdp_skip1.disabled():
            stock = trained(wiring, fsdp=True)
        assert len(ours) == len(stock)
        assert all(map(torch.equal, ours, stock))

    with_plugin(body)


# -- the order of what happens -------------------------------------------------------------------


@contextmanager
def noting(module: Wired) -> Iterator[list[tuple[str, tuple[str, ...]]]]:
    """At each hook of an activation: which blocks have gradients, and which are unsharded."""
    noted: list[tuple[str, tuple[str, ...]]] = []

    def note(where: str) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            weights = [block.up.weight for block in module.blocks]
            noted.append((where, tuple(f"{type(w).__name__}{w.grad is None}" for w in weights)))

        return hook

    def inside(place: int) -> Callable[..., None]:
        def before(_: Any, args: tuple[Tensor, ...]) -> None:
            if args[0].requires_grad:
                args[0].register_hook(note(f"input of {place}, inside"))

        return before

    def outside(place: int) -> Callable[..., None]:
        def after(_: Any, args: Any, output: Tensor) -> None:
            output.register_hook(note(f"output of {place}, outside"))

        return after

    handles = []
    for place, block in enumerate(module.blocks):
        handles.append(block.norm.register_forward_pre_hook(inside(place)))
        handles.append(block.register_forward_hook(outside(place)))
    try:
        yield noted
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("wiring", [chain, operators_between, unused], ids=lambda w: w.__name__)
def test_hooks_see_what_they_see_in_stock(wiring: Callable[[Blocks, Tensor], Tensor]) -> None:
    def run() -> list[tuple[str, tuple[str, ...]]]:
        module = built(wiring, fsdp=True)
        for step in range(4):
            module(batch(step)).sum().backward()
            module.zero_grad()
        with noting(module) as noted:
            module(batch(4)).sum().backward()
        return noted

    def body() -> None:
        import fsdp_skip1

        ours = run()
        with fsdp_skip1.disabled():
            assert ours == run()
        assert len(ours) >= 3

    with_plugin(body)


def test_a_backward_that_is_not_the_blocks_leaves_it_alone() -> None:
    """At its end torch looks at every group; until then, nothing of it is resharded or reduced."""

    def run() -> list[Any]:
        seed_everything()
        module = Wired(chain)
        for block in module.blocks:
            fully_shard(block, reshard_after_forward=False)
        fully_shard(module)
        activations: list[Tensor] = []
        module.blocks[0].register_forward_hook(lambda _, args, y: activations.append(y))
        weight, found = module.blocks[1].up.weight, []
        for step in range(6):
            module.set_requires_gradient_sync(step % 2 == 1)
            loss = module(batch(step)).sum()
            activation = activations.pop()

            def note(_: Tensor) -> None:
                found.append((type(module.blocks[1].up.weight).__name__, weight.grad is None))

            handle = activation.register_hook(note)
            torch.autograd.grad(activation.pow(3).sum(), activation, retain_graph=True)
            handle.remove()
            loss.backward()
            found.append(None if weight.grad is None else weight.grad._local_tensor.tolist())
        return found

    def body() -> None:
        import fsdp_skip1

        ours = run()
        with fsdp_skip1.disabled():
            assert ours == run()
        assert ours[-2][0] == "Parameter"

    with_plugin(body)


def test_an_activation_does_not_keep_the_blocks_that_it_was_given_to() -> None:
    def body() -> None:
        x = nn.Linear(models.DIM, models.DIM)(batch(0))
        alive = []
        for _ in range(3):
            module = built(chain, fsdp=True)
            for _ in range(4):
                module(x).sum().backward(retain_graph=True)
            alive.append(weakref.ref(module))
            del module
        gc.collect()
        assert [ref() for ref in alive] == [None] * 3

    with_plugin(body)


def test_one_hook_does_both() -> None:
    """Not a node of its own for each block: else this file looks at nothing."""

    def body() -> None:
        from fsdp_skip1 import gradients

        module = settled()
        tensors: list[Tensor] = []
        for block in module.blocks:
            block.register_forward_pre_hook(lambda _, args: tensors.append(args[0]), prepend=True)
        module(batch(3)).sum().backward()
        for tensor in tensors[1:]:
            hooks: Any = tensor._backward_hooks
            assert list(hooks) == [gradients._POST_BACKWARD, gradients._PRE_BACKWARD]
            assert hooks[gradients._POST_BACKWARD].__name__ == "post_backward"

    with_plugin(body)


def test_activations_die_with_their_graph() -> None:
    def body() -> None:
        module = settled()
        alive: list[weakref.ref[Tensor]] = []
        for block in module.blocks:
            block.register_forward_hook(lambda _, args, y: alive.append(weakref.ref(y)))
        gc.collect()
        gc.disable()
        module(batch(3)).sum().backward()
        assert len(alive) == 4
        assert all(map(operator.is_, (ref() for ref in alive), [None] * 4))

    with_plugin(body)
