"""Settled groups in one piece: when that is, when torch's own methods run, and that both agree."""

import contextlib
import functools
import itertools
import operator
import os
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import models, warmup
from support.arms import local, param_groups, seed_everything
from support.counting import counting
from support.features import RELEASE, proven_release
from support.ranks import run_ranks, with_plugin
from support.shards import shard_blocks
from torch import nn
from torch.distributed.fsdp import fully_shard

# Where torch's own methods are, which do not run while all groups are steady.
FILES = ("_fsdp_param_group.py", "_fsdp_param.py")


@pytest.fixture(scope="module", autouse=True)
def prepared():
    warmup.load()


class Training:
    """A stack in FSDP2 and the same one without, which take the same steps."""

    def __init__(self, make: Callable[[], nn.Module] = models.stack) -> None:
        self.sides = []
        for fsdp in (False, True):
            seed_everything()
            module = make()
            if fsdp:
                shard_blocks(module)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            self.sides.append((module, optimizer))
        self.module = self.sides[1][0]
        self.groups = param_groups(self.module)
        self.taken = 0

    def step(self) -> None:
        """One step of both; they have to agree in all that comes out."""
        batch = torch.randn(3, models.DIM, generator=torch.Generator().manual_seed(self.taken))
        self.taken += 1
        results: list[dict[str, torch.Tensor]] = []
        for module, optimizer in self.sides:
            loss = module(batch).pow(2).sum()
            loss.backward()
            grads = {name: p.grad for name, p in module.named_parameters()}
            grads = {name: grad for name, grad in grads.items() if grad is not None}
            results.append({"loss": loss} | grads)
            optimizer.step()
            optimizer.zero_grad()
        plain, ours = results
        assert plain.keys() == ours.keys()
        for name, value in ours.items():
            assert torch.equal(local(value), plain[name]), name


@contextlib.contextmanager
def called() -> Iterator[Counter[str]]:
    """The functions of torch's parameter groups and parameters that are called."""
    found: Counter[str] = Counter()

    def profile(frame: types.FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.endswith(FILES):
            if type(frame.f_locals.get("self")).__name__ != "FSDPCommContext":
                found[frame.f_code.co_name] += 1

    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(None)


def steady_training(**kwargs: Any) -> Training:
    training = Training(**kwargs)
    training.step()
    training.step()
    with called() as ran:
        training.step()
    assert not ran, ran
    return training


# -- which releases ------------------------------------------------------------------------------


@proven_release
def test_this_release_is_proven() -> None:
    """Fails with a torch whose methods nobody has compared ours with; then read them first."""
    from fsdp_skip1 import patch, proven

    release = proven.find(patch.look())
    assert release is not None, proven.digest(patch.look())
    assert release.name == ".".join(map(str, RELEASE))


def test_a_source_that_is_not_known_keeps_torchs_methods() -> None:
    def body() -> None:
        import fsdp_skip1
        from fsdp_skip1 import proven

        proven._RELEASES.clear()
        fsdp_skip1.disable()
        fsdp_skip1.enable()
        assert fsdp_skip1.status().trims["steady"] is False
        assert "off: steady" in str(fsdp_skip1.status())
        training = Training()
        training.step()
        training.step()
        with called() as ran:
            training.step()
        assert ran["post_backward"] == ran["pre_forward"] == len(training.groups)

    with_plugin(body)


# -- when it is ----------------------------------------------------------------------------------


@proven_release
def test_no_method_of_torchs_runs() -> None:
    with_plugin(lambda: steady_training() and None)


@proven_release
def test_a_step_takes_few_calls() -> None:
    """Python calls beyond the plain module's, against stock's. Counted, not timed."""

    def calls(module: nn.Module, x: torch.Tensor) -> int:
        count = 0

        def profile(_: types.FrameType, event: str, __: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        for _ in range(3):
            module(x).sum().backward()
        sys.setprofile(profile)
        module(x).sum().backward()
        sys.setprofile(None)
        return count

    def body() -> None:
        import fsdp_skip1

        training = steady_training()
        x = torch.ones(3, models.DIM)
        plain = calls(training.sides[0][0], x)
        ours = calls(training.module, x) - plain
        fsdp_skip1.disable()
        stock = calls(training.module, x) - plain
        assert ours < stock / 5, (ours, stock)

    with_plugin(body)


class Uneven(nn.Module):
    """One block is frozen, one has a module under two names, one a parameter without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(models.Block() for _ in range(4))
        self.blocks[1].requires_grad_(False)
        self.blocks[2].again = self.blocks[2].down
        self.blocks[3].unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@proven_release
def test_frozen_unused_and_shared_parameters_are_steady_too() -> None:
    def body() -> None:
        training = steady_training(make=Uneven)
        block = training.module.blocks[2]
        assert block.again.weight is block.down.weight

    with_plugin(body)


# -- when it is not ------------------------------------------------------------------------------


def wrap(owner: Any, name: str, seen: list[str]) -> None:
    """What another patcher does, with a function of its own."""
    before = getattr(owner, name)

    @functools.wraps(before)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        seen.append(name)
        return before(*args, **kwargs)

    setattr(owner, name, wrapper)


WATCHED = (
    ("group", "unshard"),
    ("group", "wait_for_unshard"),
    ("group", "reshard"),
    ("group", "_to_sharded"),
    ("group", "_to_unsharded"),
    ("group", "_record_post_forward"),
    ("group", "_register_post_backward_hook"),
    ("group", "pre_forward"),
    ("group", "post_forward"),
    ("group", "pre_backward"),
    ("group", "post_backward"),
    ("group", "finalize_backward"),
    ("param", "to_sharded"),
    ("param", "to_unsharded"),
    ("param", "_setattr_on_modules"),
    ("state", "_pre_backward"),
    ("state", "_root_pre_forward"),
    ("state", "_register_pre_backward_hook"),
    ("module", "foreach_reduce"),
)


@proven_release
@pytest.mark.parametrize(("owner", "name"), WATCHED, ids=lambda v: v)
def test_who_patches_a_class_later_is_called(owner: str, name: str) -> None:
    def body() -> None:
        from fsdp_skip1 import patch

        fsdp2 = patch.look()
        owners = {
            "group": fsdp2.group_classes[0],
            "param": fsdp2.param_class,
            "state": fsdp2.state_class,
            "module": fsdp2.group_module,
        }
        training = steady_training()
        seen: list[str] = []
        wrap(owners[owner], name, seen)
        training.step()
        assert len(seen) >= len(training.groups) - (owner == "state")

    with_plugin(body)


@proven_release
@pytest.mark.parametrize("name", [name for owner, name in WATCHED if owner == "group"])
def test_who_patches_a_group_later_is_called(name: str) -> None:
    def body() -> None:
        training = steady_training()
        seen: list[str] = []
        wrap(training.groups[1], name, seen)
        training.step()
        assert seen

    with_plugin(body)


@proven_release
def test_who_patches_a_state_later_is_called() -> None:
    def body() -> None:
        training = steady_training()
        state = training.module.blocks[1]._get_fsdp_state()
        seen: list[str] = []
        for name in ("_pre_backward", "_register_pre_backward_hook", "_root_pre_forward"):
            wrap(state, name, seen)
        training.step()
        assert sorted(seen) == ["_pre_backward", "_register_pre_backward_hook", "_root_pre_forward"]

    with_plugin(body)


@proven_release
def test_who_takes_an_attribute_away_for_a_method_is_called() -> None:
    def body() -> None:
        training = steady_training()
        group = training.groups[1]
        group.note = 1
        training.step()
        del group.note
        seen: list[str] = []
        wrap(group, "reshard", seen)
        training.step()
        assert len(seen) == 2
        del group.reshard
        training.step()
        with called() as ran:
            training.step()
        assert not ran, ran

    with_plugin(body)


@proven_release
def test_who_patches_between_forward_and_backward_is_called() -> None:
    def body() -> None:
        from fsdp_skip1 import patch

        training = steady_training()
        loss = training.module(torch.ones(2, models.DIM)).sum()
        seen: list[str] = []
        for name in ("unshard", "reshard"):
            wrap(patch.look().group_classes[0], name, seen)
        loss.backward()
        assert set(seen) == {"unshard", "reshard"}

    with_plugin(body)


@proven_release
def test_who_swaps_code_is_heard() -> None:
    def body() -> None:
        from fsdp_skip1 import patch

        training = steady_training()
        cls = patch.look().group_classes[0]
        cls.heard = []

        def _record_post_forward(self: Any) -> None:
            self.heard.append(self)
            self._post_forward_indices.append(len(self.comm_ctx.post_forward_order))
            self.comm_ctx.post_forward_order.append(self)

        cls._record_post_forward.__code__ = _record_post_forward.__code__
        training.step()
        assert len(cls.heard) == len(training.groups)

    with_plugin(body)


def profiled(training: Training) -> None:
    with torch.profiler.profile() as profiler:
        training.step()
    names = {event.name.partition(" (")[0] for event in profiler.events()}
    assert {"FSDP::pre_forward", "FSDP::post_backward_reshard"} <= names


def debugged(training: Training) -> None:
    import logging

    from fsdp_skip1 import patch

    heard = []
    logger = patch.look().group_module.logger
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    training.step()
    assert sum(text.startswith("FSDP::post_backward") for text in heard) >= len(training.groups)


def hooked(training: Training) -> None:
    """A post-accumulate hook on one parameter: torch's method runs for that one alone."""
    parameter = next(training.module.blocks[0].parameters())
    seen = []
    parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.shape))
    training.step()
    assert seen == [parameter.shape]


def observed(training: Training) -> None:
    """Dispatch modes find torch's operators, profiler ranges and all."""
    with counting(comms=False) as counts:
        training.step()
    assert counts.ops["profiler::_record_function_enter_new"] > 2 * len(training.groups)


def with_graph(training: Training) -> None:
    loss = training.module(torch.ones(2, models.DIM)).pow(2).sum()
    loss.backward(create_graph=True)
    training.module.zero_grad()


@proven_release
@pytest.mark.parametrize(
    "use", [profiled, debugged, hooked, observed, with_graph], ids=lambda f: f.__name__
)
def test_torchs_methods_run(use: Callable[[Training], None]) -> None:
    def body() -> None:
        training = steady_training()
        with called() as ran:
            use(training)
        assert ran["post_backward"] >= 1
        training.step()

    with_plugin(body)


@pytest.mark.parametrize("names", ["none", "registration,dtensor", "steady"])
def test_each_choice_of_trims_agrees_with_the_plain_module(names: str) -> None:
    def body(_: Any) -> None:
        os.environ["FSDP_SKIP1_TRIMS"] = names
        import fsdp_skip1

        fsdp_skip1.enable()
        training = Training()
        for _ in range(4):
            training.step()

    run_ranks(body, 1)


# -- live modules --------------------------------------------------------------------------------


def hooks_of(module: nn.Module) -> list[Any]:
    modules = module.modules()
    return [
        h for m in modules for h in (*m._forward_pre_hooks.values(), *m._forward_hooks.values())
    ]


@proven_release
def test_hooks_on_modules_are_torchs_again() -> None:
    def body() -> None:
        import fsdp_skip1

        fsdp_skip1.disable()
        training = Training()
        before = hooks_of(training.module)
        for _ in range(2):
            fsdp_skip1.enable()
            training.step()
            now = hooks_of(training.module)
            assert len(now) == len(before)
            assert not any(map(operator.is_, now, before))
            fsdp_skip1.disable()
            assert all(map(operator.is_, hooks_of(training.module), before))
        training.step()

    with_plugin(body)


@proven_release
def test_hooks_that_somebody_removed_stay_removed() -> None:
    def body() -> None:
        import fsdp_skip1

        training = steady_training()
        state = training.module.blocks[0]._get_fsdp_state()
        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()
        fsdp_skip1.disable()
        assert hooks_of(training.module.blocks[0]) == []

    with_plugin(body)


@proven_release
def test_a_toggle_between_forward_and_backward() -> None:
    def body() -> None:
        import fsdp_skip1

        training = steady_training()
        for toggles in ([False], [False, True]):
            losses = [m(torch.ones(2, models.DIM)).pow(2).sum() for m, _ in training.sides]
            for on in toggles:
                (fsdp_skip1.enable if on else fsdp_skip1.disable)()
            for loss in losses:
                loss.backward()
            pairs = zip(training.sides[0][0].parameters(), training.module.parameters())
            assert all(torch.equal(p.grad, q.grad._local_tensor) for p, q in pairs)
            for module, _ in training.sides:
                module.zero_grad()
            fsdp_skip1.enable()
        training.step()

    with_plugin(body)


class Writing(models.Block):
    """Writes to its input, as blocks with in-place activations or added positions do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.add_(1.0))


def writing() -> nn.Module:
    stack = models.stack()
    stack.blocks[1] = Writing()
    return stack


def test_a_module_may_write_to_its_input() -> None:
    """As in the plain module. Stock refuses it: its autograd Function returns a view."""

    def body() -> None:
        import fsdp_skip1

        training = Training(writing)
        training.step()
        training.step()
        with fsdp_skip1.disabled(), pytest.raises(RuntimeError, match="custom Function"):
            training.module(torch.ones(2, models.DIM))

    with_plugin(body)


@proven_release
def test_a_hook_on_one_parameter_sees_the_gradients_before_it() -> None:
    """Those before it in its group, and none behind it, as in stock."""

    def run(on: bool) -> list[list[bool]]:
        import fsdp_skip1

        (fsdp_skip1.enable if on else fsdp_skip1.disable)()
        module = models.stack()
        shard_blocks(module)
        parameters = list(module.blocks[0].parameters())
        seen = []

        def hook(_: nn.Parameter) -> None:
            seen.append([p.grad is not None for p in parameters])

        parameters[2].register_post_accumulate_grad_hook(hook)
        for _ in range(3):
            module(torch.ones(2, models.DIM)).sum().backward()
            module.zero_grad()
        return seen

    stock, ours = with_plugin(lambda: (run(False), run(True)))
    assert ours == stock
    assert stock[-1] == [True, True, True, False, False]


class Selective(models.Stack):
    """Checkpoints a region of two blocks and one of one; matrix products are not computed again."""

    def __init__(self) -> None:
        super().__init__(depth=3)
        self.before = nn.Linear(models.DIM, models.DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils import checkpoint as ac

        def policy(_: Any, op: Any, *__: Any, **___: Any) -> ac.CheckpointPolicy:
            saved = op is torch.ops.aten.addmm.default
            choice = ac.CheckpointPolicy
            return choice.MUST_SAVE if saved else choice.PREFER_RECOMPUTE

        first, second, third = self.blocks
        contexts = functools.partial(ac.create_selective_checkpoint_contexts, policy)
        run = functools.partial(ac.checkpoint, use_reentrant=False, context_fn=contexts)
        return self.head(run(third, run(lambda y: second(first(y)), self.before(x))))


@proven_release
def test_selective_checkpointing_over_blocks() -> None:
    """It compares the operators of two forwards: neither may be shortened alone."""

    def body() -> None:
        training = Training(Selective)
        for _ in range(4):
            training.step()

    with_plugin(body)


@proven_release
@pytest.mark.parametrize("compiled_first", [False, True])
def test_blocks_compiled_as_one_graph(compiled_first: bool) -> None:
    """torch.compile passes over our hooks as it does over torch's."""

    def body() -> None:
        training = Training(compiled if compiled_first else models.stack)
        if not compiled_first:
            compile_blocks(training.module)
        for _ in range(4):
            training.step()

    with_plugin(body)


def compile_blocks(module: nn.Module) -> None:
    for block in module.blocks:
        block.compile(backend="eager", fullgraph=True)


def compiled() -> nn.Module:
    stack = models.stack()
    compile_blocks(stack)
    return stack


class Passing(nn.Module):
    """Gives its input back as it is, beside a use of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(models.DIM))
        self.noted: list[str] = []

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if x.requires_grad:
            x.register_hook(lambda _: self.noted.append(type(self.weight).__name__))
        return x, x * self.weight


@proven_release
def test_hooks_of_the_input_come_before_the_reshard() -> None:
    """Tensor hooks inside the module see unsharded parameters, as in stock."""

    def run(on: bool) -> list[str]:
        import fsdp_skip1

        (fsdp_skip1.enable if on else fsdp_skip1.disable)()
        module = nn.Sequential(nn.Linear(models.DIM, models.DIM), Passing())
        for child in module:
            fully_shard(child)
        fully_shard(module)
        for _ in range(3):
            x, y = module(torch.ones(2, models.DIM))
            (x + y).sum().backward()
        return module[1].noted

    assert with_plugin(lambda: (run(False), run(True))) == (["Parameter"] * 3,) * 2


@proven_release
@pytest.mark.parametrize("names", ["all", "none"])
def test_backward_inside_of_something_compiled(names: str) -> None:
    """torch.compile looks at every frame of it that torch has not switched it off for."""

    def body(_: Any) -> None:
        os.environ["FSDP_SKIP1_TRIMS"] = names
        import fsdp_skip1

        fsdp_skip1.enable()
        training = Training()
        training.step()
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compiled = torch.compile(lambda loss: loss.backward(), backend="eager")
        for _ in range(6):
            for module, _ in training.sides:
                compiled(module(torch.ones(2, models.DIM)).pow(2).sum())
            pairs = zip(training.sides[0][0].parameters(), training.module.parameters())
            assert all(torch.equal(p.grad, q.grad._local_tensor) for p, q in pairs)
        breaks = "\n".join(torch._dynamo.utils.counters["graph_break"])
        assert "fsdp_skip1" not in breaks
        training.step()

    run_ranks(body, 1)


# -- references ----------------------------------------------------------------------------------


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="None is not counted there")
def test_steps_leave_the_references_of_none_alone() -> None:
    """2.6 and 2.7 know a function that gives away one at each call. Python ends without them."""
    steps = 30

    def body() -> int:
        training = Training()
        training.step()  # an optimizer's step gives some away itself
        for taken in range(3 + steps):
            if taken == 3:
                before = sys.getrefcount(None)
            training.module(torch.ones(3, models.DIM)).sum().backward()
        return sys.getrefcount(None) - before

    assert abs(with_plugin(body)) < steps


def test_looking_at_the_frame_callback_leaves_it_alone() -> None:
    def body() -> tuple[int, int]:
        from fsdp_skip1.frames import frame_callback

        callback = object().__repr__  # that frames are looked at with: nothing runs meanwhile
        switch, looks = torch._C._dynamo.eval_frame.set_eval_frame, itertools.repeat(None, 100)
        before = sys.getrefcount(callback)
        switch(callback)
        for _ in looks:
            frame_callback()
        found = frame_callback()
        switch(None)
        assert found is callback
        assert frame_callback() is None
        del found
        return before, sys.getrefcount(callback)

    before, after = with_plugin(body)
    assert before == after
