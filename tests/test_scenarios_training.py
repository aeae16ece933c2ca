"""Training loops: optimizers, hooks, clipping, evaluation between steps, several passes."""

import contextlib

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from support import models, shards
from support.arms import Run, Scenario, local
from support.results import arm_tests
from support.steps import adamw, backward, forward, loss_of, sgd, tokens, train, update

pytestmark = pytest.mark.scenario

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


# - Several forwards, evaluation, inference


def several_forwards(run: Run) -> None:
    """Two forwards through the same weights, then one backward through both."""
    run.optimizer = adamw(run.module.parameters())
    for step in range(3):
        with run.count("step"):
            first = forward(run, f"step {step}.0", run.batch(2 * step))
            second = forward(run, f"step {step}.1", run.batch(2 * step + 1))
            backward(run, first + 2 * second)
        update(run, f"step {step}")


def evaluation_between(run: Run) -> None:
    run.optimizer = adamw(run.module.parameters())
    for step in range(3):
        backward(run, forward(run, f"step {step}", run.batch(step)))
        update(run, f"step {step}")
        run.module.eval()
        with torch.no_grad(), run.count("eval"):
            for index in range(2):
                run.record(f"step {step}/eval {index}", run.forward(run.batch(20 + index)))
        run.module.train()


def evaluation_of_unsynced(run: Run) -> None:
    """Evaluation while gradients wait for the next microbatch."""
    run.optimizer = sgd(run.module.parameters())
    for step in range(2):
        if run.fsdp:
            run.module.set_requires_gradient_sync(False)
        backward(run, forward(run, f"step {step}.0", run.batch(2 * step)), sync=False)
        with torch.no_grad():
            run.record(f"step {step}/eval", run.forward(run.batch(9)))
        if run.fsdp:
            run.module.set_requires_gradient_sync(True)
        backward(run, forward(run, f"step {step}.1", run.batch(2 * step + 1)))
        update(run, f"step {step}")


def two_models(run: Run) -> None:
    """One loss over two passes with an update of one part between: a GAN's loop, in short."""
    first, second = run.module
    optimizers = [sgd(first.parameters()), sgd(second.parameters())]
    for step in range(3):
        x = run.batch(step)
        fake = first(x)
        loss_of(second(fake.detach())).backward()
        run.record_gradients(f"step {step}/second")
        optimizers[1].step()
        optimizers[1].zero_grad()
        loss = loss_of(second(fake))
        run.record(f"step {step}/loss", loss)
        loss.backward()
        run.record_gradients(f"step {step}/first")
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        run.record_parameters(f"step {step}")


def two_roots(run: Run) -> None:
    for part in run.module:
        for block in part.blocks:
            fully_shard(block, mesh=run.mesh(1))
        fully_shard(part, mesh=run.mesh(1))


def pair() -> nn.Module:
    return nn.ModuleList([models.Stack(depth=1, out=models.DIM), models.Stack(depth=1)])


def retained_graph(run: Run) -> None:
    run.optimizer = sgd(run.module.parameters())
    for step in range(2):
        loss = forward(run, f"step {step}", run.batch(step))
        loss.backward(retain_graph=True)
        run.record_gradients(f"step {step}, once")
        backward(run, loss)
        update(run, f"step {step}")


def gradient_of_input(run: Run) -> None:
    """The input asks for a gradient too, so that backward goes on past the root."""
    run.optimizer = sgd(run.module.parameters())
    for step in range(2):
        x = run.batch(step).requires_grad_()
        backward(run, forward(run, f"step {step}", x))
        run.record(f"step {step}/input grad", x.grad)
        update(run, f"step {step}")


def first_block_needs_no_input_gradient(run: Run) -> None:
    """Autograd stops short of the first block: its post-backward runs at the very end."""
    run.module.blocks[0].requires_grad_(False)
    run.module.blocks[0].up.bias.requires_grad_(True)


def unused_experts(run: Run) -> None:
    run.optimizer = adamw(run.module.parameters())
    for step, active in enumerate([(0,), (0, 1), (1, 2), (0, 0)]):
        run.module.active = active
        with run.count("step"):
            backward(run, forward(run, f"step {step}", run.batch(step)))
        update(run, f"step {step}")


def experts(run: Run) -> None:
    for expert in run.module.experts:
        fully_shard(expert, mesh=run.mesh(1))
    fully_shard(run.module, mesh=run.mesh(1))


def keyword_inputs(run: Run) -> None:
    run.optimizer = sgd(run.module.parameters())
    for step in range(2):
        x = run.batch(step)
        output = run.forward(inputs={"x": x.requires_grad_(), "mask": [x > 0, None]})
        run.record(f"step {step}/output", output["y"][0])
        backward(run, loss_of(output["y"][0]))
        run.record(f"step {step}/input grad", x.grad)
        update(run, f"step {step}")


class Keywords(nn.Module):
    """Inputs and outputs inside containers, which FSDP2 has to walk."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([models.Block(), models.Block()])

    def forward(self, inputs: dict) -> dict:
        x = inputs["x"].masked_fill(~inputs["mask"][0], 0.1)
        for block in self.blocks:
            x = block(x)
        return {"y": (x, None)}


# - Hooks


def optimizer_in_backward(run: Run) -> None:
    """An optimizer for each parameter, run as soon as its gradient is there."""
    optimizers = {p: torch.optim.SGD([p], lr=0.05) for p in run.module.parameters()}
    seen: list[str] = []
    names = {p: name for name, p in run.module.named_parameters()}

    def step_now(parameter: nn.Parameter) -> None:
        seen.append(names[parameter])
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    handles = [p.register_post_accumulate_grad_hook(step_now) for p in optimizers]
    for step in range(3):
        with run.count("step"):
            backward(run, forward(run, f"step {step}", run.batch(step)))
        run.record_parameters(f"step {step}")
        run.record(f"step {step}/hooks", sorted(seen))
        run.record(f"fsdp/step {step}/order", seen if run.fsdp else None)
        seen.clear()
    for handle in handles:
        handle.remove()
    # Without hooks again, as after a warm-up.
    run.optimizer = sgd(run.module.parameters())
    backward(run, forward(run, "last", run.batch(9)))
    update(run, "last")


def hook_on_accumulation(run: Run) -> None:
    """Post-accumulate hooks while gradients add up into what is there."""
    run.optimizer = sgd(run.module.parameters())

    def halve_now(parameter: nn.Parameter) -> None:
        local(parameter.grad).mul_(0.5)

    for parameter in run.module.parameters():
        parameter.register_post_accumulate_grad_hook(halve_now)
    for step in range(2):
        for index in range(2):
            backward(run, forward(run, f"step {step}.{index}", run.batch(2 * step + index)))
        update(run, f"step {step}")


def module_hooks(run: Run) -> None:
    """Forward, backward and tensor hooks of the user see what they saw."""
    seen: list[torch.Tensor] = []
    block = run.module.blocks[0]
    block.register_forward_pre_hook(lambda m, x: seen.append(x[0]))
    block.register_forward_hook(lambda m, x, y: seen.append(y))
    block.register_full_backward_hook(lambda m, gi, go: seen.extend([*gi, *go]))
    block.up.register_forward_pre_hook(lambda m, x: seen.append(m.weight.detach().clone()))
    run.optimizer = sgd(run.module.parameters())
    for step in range(2):
        backward(run, forward(run, f"step {step}", run.batch(step).requires_grad_()))
        for index, tensor in enumerate(seen):
            run.record(f"step {step}/hook {index}", tensor.detach())
        seen.clear()
        update(run, f"step {step}")


def shrink(gradients: torch.Tensor) -> None:
    """Not linear: a sum that is divided later would come out differently."""
    gradients.mul_(0.5).clamp_(-0.05, 0.05)


def all_reduce_hook(apply: shards.Apply) -> shards.Apply:
    def shard(run: Run) -> None:
        apply(run)
        # The plain arm has one element a parameter where the hook has one a group.
        for module in run.fsdp_modules():
            module.set_all_reduce_hook(shrink)

    return shard


def shrink_by_hand(run: Run, step: int) -> None:
    """What the hook does, in the plain arm, before an update sees the gradients."""
    if not run.fsdp:
        for parameter in run.module.parameters():
            shrink(parameter.grad)


# - Optimizers, clipping, scaling


def clipped(foreach: bool | None):
    def clip(run: Run, step: int) -> None:
        norm = nn.utils.clip_grad_norm_(run.module.parameters(), 0.5, foreach=foreach)
        run.record(f"step {step}/norm", norm)

    return clip


def clip_by_value(run: Run, step: int) -> None:
    nn.utils.clip_grad_value_(run.module.parameters(), 0.05)


def optimizer(kind, **kwargs):
    return lambda parameters: kind(list(parameters), lr=0.02, **kwargs)


def scaled(run: Run) -> None:
    """A GradScaler on CPU, with one step whose gradients overflow."""
    run.optimizer = sgd(run.module.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for step in range(4):
        loss = forward(run, f"step {step}", run.batch(step) * (torch.inf if step == 2 else 1))
        backward(run, scaler.scale(loss))
        run.record_gradients(f"step {step}")
        scaler.step(run.optimizer)
        scaler.update()
        run.record(f"step {step}/scale", scaler.get_scale())
        run.optimizer.zero_grad()
        run.record_parameters(f"step {step}")


def autocast(run: Run) -> None:
    run.optimizer = sgd(run.module.parameters())
    for step in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            loss = forward(run, f"step {step}", run.batch(step))
        backward(run, loss)
        update(run, f"step {step}")


def gradients_by_hand(run: Run) -> None:
    """``.grad`` set by the user before backward adds up; zeroed in place stays the same tensor."""
    run.optimizer = sgd(run.module.parameters())
    for parameter in run.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    for step in range(3):
        backward(run, forward(run, f"step {step}", run.batch(step)))
        held = {name: p.grad for name, p in run.module.named_parameters()}
        update(run, f"step {step}", set_to_none=False)
        for name, parameter in run.module.named_parameters():
            run.record(f"step {step}/same {name}", parameter.grad is held[name])


def gradients_kept(run: Run) -> None:
    """A user holds on to gradients of one step while the next overwrites nothing of them."""
    run.optimizer = sgd(run.module.parameters())
    kept = []
    for step in range(3):
        backward(run, forward(run, f"step {step}", run.batch(step)))
        kept.append({name: p.grad for name, p in run.module.named_parameters()})
        update(run, f"step {step}")
    for step, grads in enumerate(kept):
        run.record_all(f"kept {step}", grads)


def parameters_changed(run: Run) -> None:
    """In-place changes of sharded parameters between steps are seen by the next forward."""
    run.optimizer = sgd(run.module.parameters())
    for step in range(3):
        with torch.no_grad():
            for parameter in run.module.parameters():
                local(parameter).add_(0.01 * step)
        with run.count("step"):
            backward(run, forward(run, f"step {step}", run.batch(step)))
        update(run, f"step {step}")


@contextlib.contextmanager
def profiled():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield profile


def under_a_profiler(run: Run) -> None:
    run.optimizer = sgd(run.module.parameters())
    for step in range(2):
        with profiled():
            backward(run, forward(run, f"step {step}", run.batch(step)))
        update(run, f"step {step}")


# - Modules in a user's hands


class Noted(nn.Linear):
    """Brings a ``__setattr__`` of its own, which FSDP2 goes through."""

    def __setattr__(self, name, value):
        self.__dict__["noted"] = self.__dict__.get("noted", 0) + (name == "weight")
        super().__setattr__(name, value)


def modules_changed(run: Run) -> None:
    """What hangs off a module is replaced once training runs; then the module's class."""
    run.optimizer = sgd(run.module.parameters())
    for step in range(4):
        backward(run, forward(run, f"step {step}", run.batch(step)))
        update(run, f"step {step}")
        if step == 1:
            for module in run.module.modules():
                module.__dict__["_parameters"] = dict(module._parameters)
        if step == 2:
            run.module.blocks[0].up.__class__ = Noted
    run.record("noted", torch.tensor(run.module.blocks[0].up.noted if run.fsdp else 0))


def sparse_gradients(run: Run) -> None:
    """Refused, in the words of torch."""
    try:
        loss_of(run.module(tokens(run, 0))).backward()
    except (NotImplementedError, RuntimeError) as error:
        run.record("refused", torch.tensor(list(str(error).encode())))
    else:
        raise AssertionError("not refused")


def sparse() -> nn.Module:
    return nn.Sequential(nn.Embedding(models.VOCAB, models.DIM, sparse=True), models.Block())


SCENARIOS = [
    # Passes
    Scenario(name="several forwards before one backward", shard=shards.blocks(1),
             steps=several_forwards, comm_mode=False),
    Scenario(name="several forwards before one backward, hsdp", shard=shards.blocks(2, 1),
             world=2, replicas=2, steps=several_forwards, comm_mode=False),
    Scenario(name="several forwards, kept after forward", steps=several_forwards,
             shard=shards.blocks(1, reshard_after_forward=False), comm_mode=False),
    Scenario(name="evaluation between steps", shard=shards.blocks(1), steps=evaluation_between,
             comm_mode=False),
    Scenario(name="evaluation between microbatches", shard=shards.blocks(1),
             steps=evaluation_of_unsynced),
    Scenario(name="two roots in turns", model=pair, shard=two_roots, steps=two_models),
    Scenario(name="retain_graph", shard=shards.blocks(1), steps=retained_graph),
    Scenario(name="gradient of the input", shard=shards.blocks(1), steps=gradient_of_input),
    Scenario(name="autograd stops short of the first block", shard=shards.blocks(1),
             prepare=first_block_needs_no_input_gradient, steps=train()),
    Scenario(name="unused parameters", model=models.Branches, shard=experts,
             steps=unused_experts, comm_mode=False),
    Scenario(name="inputs in containers", model=Keywords, shard=shards.blocks(1),
             steps=keyword_inputs),
    Scenario(name="dropout", model=models.stack_of(dropout=0.3), shard=shards.blocks(1),
             steps=train()),
    Scenario(name="transformer, dropout, hsdp", world=2, replicas=2,
             model=lambda: models.Transformer(dropout=0.2), shard=shards.blocks(2, 1),
             steps=train(inputs=tokens)),
    # Hooks
    Scenario(name="optimizer in backward", shard=shards.blocks(1), steps=optimizer_in_backward),
    Scenario(name="optimizer in backward, block used twice", model=models.Shared,
             shard=shards.root(1), steps=optimizer_in_backward, comm_mode=False),
    Scenario(name="optimizer in backward, hsdp", shard=shards.blocks(2, 1), world=2,
             like_plain=False, replicas=2, steps=optimizer_in_backward),
    Scenario(name="optimizer in backward, bf16", shard=shards.blocks(1, mp_policy=MIXED),
             like_plain=False, steps=optimizer_in_backward),
    Scenario(name="post-accumulate hooks on accumulation", shard=shards.blocks(1),
             steps=hook_on_accumulation),
    Scenario(name="module and tensor hooks", shard=shards.blocks(1), steps=module_hooks),
    Scenario(name="all-reduce hook", shard=all_reduce_hook(shards.blocks(1)),
             steps=train(after_backward=shrink_by_hand),
             needs=("FSDPModule.set_all_reduce_hook",)),
    Scenario(name="all-reduce hook, hsdp", shard=all_reduce_hook(shards.blocks(2, 1)), world=2,
             replicas=2, steps=train(after_backward=shrink_by_hand),
             needs=("FSDPModule.set_all_reduce_hook",)),
    Scenario(name="all-reduce hook, hsdp, bf16", world=2, like_plain=False,
             shard=all_reduce_hook(shards.blocks(2, 1, mp_policy=BF16)), steps=train(),
             needs=("FSDPModule.set_all_reduce_hook", "gloo averages")),
    Scenario(name="all-reduce hook, replicate", shard=all_reduce_hook(shards.replicated(2)),
             world=2, replicas=2, steps=train(after_backward=shrink_by_hand),
             needs=("FSDPModule.set_all_reduce_hook", "replicate_with_fsdp")),
    # Optimizers
    Scenario(name="clip_grad_norm_", shard=shards.blocks(1), like_plain=False,
             steps=train(after_backward=clipped(None))),
    Scenario(name="clip_grad_norm_, one by one", shard=shards.blocks(1),
             steps=train(after_backward=clipped(False)), like_plain=False),
    Scenario(name="clip_grad_norm_, hsdp", shard=shards.blocks(2, 1), world=2, replicas=2,
             steps=train(after_backward=clipped(None)), like_plain=False),
    Scenario(name="clip_grad_value_", shard=shards.blocks(1),
             steps=train(after_backward=clip_by_value)),
    *(
        Scenario(name=f"{kind.__name__} {kwargs or ''}", shard=shards.blocks(1),
                 steps=train(optimizer=optimizer(kind, **kwargs)))
        for kind, kwargs in (
            (torch.optim.AdamW, {"foreach": True}),
            (torch.optim.AdamW, {"foreach": False}),
            (torch.optim.AdamW, {"fused": True}),
            (torch.optim.Adam, {"fused": True, "amsgrad": True}),
            (torch.optim.SGD, {"foreach": True, "momentum": 0.9, "nesterov": True}),
        )
    ),
    Scenario(name="GradScaler", shard=shards.blocks(1), steps=scaled),
    Scenario(name="autocast", shard=shards.blocks(1), steps=autocast),
    # Gradients and parameters in a user's hands
    Scenario(name="gradients zeroed in place", shard=shards.blocks(1),
             steps=train(set_to_none=False)),
    Scenario(name="gradients zeroed in place, hsdp", shard=shards.blocks(2, 1), world=2,
             replicas=2, like_plain=False, steps=train(set_to_none=False)),
    Scenario(name="gradients set by hand", shard=shards.blocks(1), steps=gradients_by_hand),
    Scenario(name="gradients kept", shard=shards.blocks(1), steps=gradients_kept),
    Scenario(name="gradients kept, hsdp", shard=shards.blocks(2, 1), world=2, replicas=2,
             steps=gradients_kept),
    Scenario(name="parameters changed between steps", shard=shards.blocks(1),
             steps=parameters_changed),
    Scenario(name="parameters changed between steps, bf16", like_plain=False,
             shard=shards.blocks(1, mp_policy=MIXED), steps=parameters_changed),
    Scenario(name="modules changed", shard=shards.blocks(1), like_plain=False,
             steps=modules_changed),
    Scenario(name="sparse gradients", model=sparse, shard=shards.root(1), like_plain=False,
             steps=sparse_gradients),
    Scenario(name="under a profiler", shard=shards.blocks(1), steps=under_a_profiler),
]  # fmt: skip


@arm_tests(SCENARIOS)
def test_scenario(scenario: Scenario, arm: str, ledger) -> None:
    ledger.judge(scenario, arm)
