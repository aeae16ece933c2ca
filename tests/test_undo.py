"""What is switched off leaves nothing behind: on torch's classes, on live groups, in memory."""

import collections
import contextlib
import copy
import gc
import importlib
import inspect
import logging
import os
import pickle
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import altered
from support.altered import Heard
from support.arms import param_groups
from support.ranks import run_ranks
from test_other_patchers import differences, snapshot, traces


@pytest.fixture(scope="module", autouse=True)
def prepared():
    altered.prepare()


def in_child(body: Any) -> Any:
    return run_ranks(lambda rank: body(), 1, fresh=True)[0]


# -- torch's classes and modules -----------------------------------------------------------------


@pytest.mark.parametrize("zero_copy", [True, False])
def test_every_object_is_torchs_again(zero_copy: bool) -> None:
    def body() -> None:
        before = snapshot()
        import fsdp_skip1
        from fsdp_skip1 import patch

        fsdp_skip1.enable(zero_copy=zero_copy)
        replaced = {(point.owner.__name__, point.name) for point in patch.points()}
        found = {line.split(" is ")[0] for line in differences(before, "")}
        assert found == {f"{owner}.{name}" for owner, name in replaced}
        assert {name for _, name in replaced} >= {"unshard", "wait_for_unshard", "foreach_reduce"}
        altered.train()
        fsdp_skip1.disable()
        assert differences(before, "") == []
        assert altered.leftovers() == []

    in_child(body)


def test_a_thousand_toggles_leave_one_wrapper_and_no_garbage() -> None:
    def body() -> None:
        import fsdp_skip1
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

        live = altered.small_model()
        altered.train_more(live, 1)

        def toggle(times: int) -> None:
            for i in range(times):
                fsdp_skip1.enable(zero_copy=i % 2 == 0)
                if i % 50 == 0:
                    altered.train_more(live, 1)
                fsdp_skip1.disable()

        def count() -> tuple[int, int]:
            gc.collect()
            objects = gc.get_objects()
            ours = sum("fsdp_skip1" in str(type(o).__module__) for o in objects)
            return ours, len(objects)

        fsdp_skip1.disable()
        own = vars(FSDPParamGroup)["unshard"]
        toggle(60)
        before = count()
        toggle(940)
        after = count()
        assert after[0] <= before[0], (before, after)
        assert after[1] - before[1] < 200, (before, after)
        assert vars(FSDPParamGroup)["unshard"] is own
        fsdp_skip1.enable()
        assert vars(FSDPParamGroup)["unshard"].__wrapped__ is own

    in_child(body)


def test_toggles_below_another_wrapper_do_not_pile_up() -> None:
    def body() -> None:
        import fsdp_skip1
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

        def depth() -> int:
            found, function = 0, vars(FSDPParamGroup)["unshard"]
            while function is not None:
                found += type(function).__module__.startswith("fsdp_skip1")
                closure = getattr(function, "__closure__", None)
                inner = vars(function).get("original") if closure is None else None
                function = (
                    inner or getattr(function, "__wrapped__", None) or originals.get(function)
                )
            return found

        originals: dict[Any, Any] = {}
        fsdp_skip1.enable()
        own = vars(FSDPParamGroup)["unshard"].__wrapped__
        original = vars(FSDPParamGroup)["unshard"]

        def theirs(self: Any, async_op: bool = False) -> Any:
            return original(self, async_op)

        originals[theirs] = original
        FSDPParamGroup.unshard = theirs
        for _ in range(50):
            fsdp_skip1.disable()
            assert vars(FSDPParamGroup)["unshard"] is theirs
            altered.train(steps=1)
            fsdp_skip1.enable()
            assert depth() == 1
        # Their undo puts ours back; in place or not, the next switch finds torch's own below.
        FSDPParamGroup.unshard = original
        for _ in range(3):
            fsdp_skip1.enable()
            assert depth() == 1
            fsdp_skip1.disable()
        assert vars(FSDPParamGroup)["unshard"] is own

    in_child(body)


def test_ours_below_another_passes_through_and_the_log_says_so() -> None:
    def body() -> None:
        import fsdp_skip1
        from fsdp_skip1.counters import counters
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

        lines: list[str] = []

        class Handler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                lines.append(record.getMessage())

        logger = logging.getLogger("fsdp_skip1")
        logger.addHandler(Handler())
        logger.setLevel(logging.INFO)
        fsdp_skip1.enable()
        from support.patchers import helpers

        helpers.install()
        theirs = vars(FSDPParamGroup)["wait_for_unshard"]
        with Heard() as heard:
            fsdp_skip1.disable()
        assert heard.all == []
        said = [line for line in lines if "passes through" in line]
        assert any(
            line.startswith(
                "FSDPParamGroup.wait_for_unshard was wrapped by support.patchers.helpers"
            )
            for line in said
        ), lines
        assert len(said) == 3, said
        counters.reset()
        model = altered.small_model()
        altered.train_more(model)
        assert helpers.calls and counters.all_gathers == 0
        assert [t for g in param_groups(model) for t in traces(g)] == []
        assert vars(FSDPParamGroup)["wait_for_unshard"] is theirs
        helpers.undo()  # this puts ours back
        assert altered.leftovers()
        altered.train_more(model)  # and the first call makes it go
        assert altered.leftovers() == []

    in_child(body)


def test_with_nobody_around_ours_none_stays() -> None:
    def body() -> list[str]:
        lines: list[str] = []

        class Handler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                lines.append(record.getMessage())

        import fsdp_skip1

        logging.getLogger("fsdp_skip1").addHandler(Handler())
        logging.getLogger("fsdp_skip1").setLevel(logging.INFO)
        fsdp_skip1.enable()
        altered.train(steps=1)
        fsdp_skip1.disable()
        return lines

    lines = in_child(body)
    assert lines
    assert not any("passes through" in line for line in lines), lines


def test_a_wrapper_of_an_earlier_copy_of_the_package_is_not_wrapped() -> None:
    def body() -> None:
        before = snapshot()
        import fsdp_skip1
        from support.patchers import helpers

        fsdp_skip1.enable()
        helpers.install()  # keeps wrappers of this copy
        fsdp_skip1.disable()
        for name in [n for n in sys.modules if n.partition(".")[0] == "fsdp_skip1"]:
            del sys.modules[name]
        os.environ["FSDP_SKIP1"] = "0"
        import fsdp_skip1 as second

        helpers.undo()  # and puts them back
        assert altered.leftovers()
        del os.environ["FSDP_SKIP1"]
        assert second.enable()
        for (owner, name), stock in before.items():
            if name in ("unshard", "wait_for_unshard", "foreach_reduce"):
                assert vars(owner)[name].__wrapped__ is stock
        altered.train(steps=1)
        second.disable()
        assert differences(before, "") == []

    in_child(body)


def test_what_was_there_before_us_comes_back_as_it_was_stored() -> None:
    """Even if somebody has put back what an attribute access gave, instead of what was stored."""

    def body() -> None:
        import wrapt
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

        own = vars(FSDPParamGroup)["unshard"]
        theirs = wrapt.FunctionWrapper(
            own, lambda wrapped, _, args, kwargs: wrapped(*args, **kwargs)
        )
        FSDPParamGroup.unshard = theirs
        import fsdp_skip1

        assert fsdp_skip1.enable()
        FSDPParamGroup.unshard = FSDPParamGroup.unshard
        altered.train(steps=1)
        fsdp_skip1.disable()
        assert vars(FSDPParamGroup)["unshard"] is theirs

    in_child(body)


def test_bound_methods_kept_on_a_group_go_with_us() -> None:
    def body() -> None:
        import fsdp_skip1
        from support.patchers import tracker

        fsdp_skip1.enable()
        model = altered.small_model()
        altered.train_more(model, 1)
        tracker.install()
        altered.train_more(model, 1)
        tracker.undo()  # leaves on each group what it had got by looking the methods up
        groups = param_groups(model)
        assert any("fsdp_skip1" in type(v).__module__ for g in groups for v in vars(g).values())
        fsdp_skip1.disable()
        assert [t for g in groups for t in traces(g)] == []
        assert all(inspect.ismethod(vars(g)["unshard"]) for g in groups)

    in_child(body)


# -- what the methods look like ---------------------------------------------------------------------


def test_replaced_functions_look_like_torchs() -> None:
    def body() -> None:
        before = snapshot()
        import fsdp_skip1
        from fsdp_skip1 import patch

        fsdp_skip1.enable()
        checked = 0
        for point in patch.points():
            stock, ours = before[point.owner, point.name], getattr(point.owner, point.name)
            if not inspect.isfunction(stock):
                continue
            checked += 1
            assert inspect.isfunction(ours) and callable(ours)
            for name in ("__name__", "__qualname__", "__doc__", "__module__", "__annotations__"):
                assert getattr(ours, name) == getattr(stock, name), name
            assert inspect.signature(ours) == inspect.signature(stock)
            assert inspect.getsource(ours) == inspect.getsource(stock)
            assert inspect.getsourcefile(ours) == inspect.getsourcefile(stock)
            assert ours == stock and hash(ours) == hash(stock)
            assert copy.copy(ours) is not None and copy.deepcopy(ours) == stock
            for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
                data = pickle.dumps(ours, protocol)
                assert b"fsdp_skip1" not in data  # it can be loaded where we are not
                assert pickle.loads(data) == ours
            with fsdp_skip1.disabled():
                if point.owner.__name__ == stock.__module__ or isinstance(point.owner, type):
                    assert pickle.loads(data) is stock
        assert checked >= 5

    in_child(body)


def test_bound_methods_look_like_torchs() -> None:
    def body() -> None:
        import fsdp_skip1
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

        fsdp_skip1.enable()
        group = object.__new__(FSDPParamGroup)
        group._module_fqn = "a"
        method = group.unshard
        assert inspect.ismethod(method) and method.__self__ is group
        assert str(inspect.signature(method)) == "(async_op: 'bool' = False)".replace(
            "'bool'", "'bool'" if sys.modules[FSDPParamGroup.__module__].__dict__.get("annotations")
            else "bool")  # fmt: skip
        assert method == group.unshard and method.__func__ == FSDPParamGroup.unshard
        again = pickle.loads(pickle.dumps(method))
        assert again.__self__._module_fqn == "a" and again.__name__ == "unshard"
        other = copy.deepcopy(method)
        assert other.__self__ is not group and other.__self__._module_fqn == "a"

    in_child(body)


def test_modules_that_share_a_function_go_on_sharing_it() -> None:
    def body() -> None:
        import fsdp_skip1
        from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group

        fsdp_skip1.enable()
        assert _fsdp_collectives.foreach_reduce is _fsdp_param_group.foreach_reduce
        importlib.reload(_fsdp_param_group)
        assert _fsdp_collectives.foreach_reduce is _fsdp_param_group.foreach_reduce
        fsdp_skip1.disable()
        assert altered.leftovers() == []

    in_child(body)


# -- live groups --------------------------------------------------------------------------------------

OPTIONS = {
    "": {},
    "kept": {"reshard_after_forward": False},
    "hsdp": {"mesh": (1, 1)},
    "bf16": {"mp_policy": "bf16"},
    "offload": {"offload_policy": "cpu"},
}


def options(name: str) -> dict[str, Any]:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    policies = {
        "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "cpu": CPUOffloadPolicy(pin_memory=False),
    }
    return {key: policies.get(str(v), v) for key, v in OPTIONS[name].items()}


def images(model: Any) -> list[Any]:
    """The state of each unsharded parameter, in the terms of stock torch."""
    found = []
    for group in param_groups(model):
        for p in group.fsdp_params:
            outputs = [
                (t.dtype, t.numel(), t.untyped_storage().size()) for t in p.all_gather_outputs
            ]
            whole = p._unsharded_param
            size = whole.untyped_storage().size()
            values = whole.detach().flatten().tolist() if size else None
            found.append((p._param_fqn, outputs, tuple(whole.shape), whole.stride(), whole.dtype,
                          whole.requires_grad, size, values, p.sharded_state.name))  # fmt: skip
        found.append((sorted(vars(group)), group._sharded_state.name, group._training_state.name,
                      group._all_gather_result is None))  # fmt: skip
    return found


def moments(model: Any, visit: Any) -> None:
    """Calls ``visit`` at points of a step where groups are in different states."""
    altered.train_more(model, 1)
    visit("after a step")
    with torch.no_grad():
        model(torch.ones(2, 4))
    visit("after an evaluation")
    model[0].unshard()
    visit("unsharded by hand")
    model[0].reshard()
    model[1].register_forward_hook(lambda *_: visit("in forward"))
    loss = model(torch.ones(2, 4)).float().sum()
    visit("after forward")
    model[0].weight.grad = None
    loss.backward()
    visit("after backward")


@pytest.mark.parametrize("name", OPTIONS)
def test_live_groups_are_as_in_stock(name: str) -> None:
    def under(switch: bool) -> dict[str, Any]:
        found: dict[str, Any] = {}
        model = altered.small_model(**options(name))

        def visit(moment: str) -> None:
            if switch:
                import fsdp_skip1

                parameters = [
                    p._unsharded_param for g in param_groups(model) for p in g.fsdp_params
                ]
                fsdp_skip1.disable()
                assert [t for g in param_groups(model) for t in traces(g)] == [], moment
                same = [p._unsharded_param for g in param_groups(model) for p in g.fsdp_params]
                assert all(a is b for a, b in zip(parameters, same)), moment
            if moment in found:
                return
            found[moment] = images(model)
            if switch:
                fsdp_skip1.enable()

        moments(model, visit)
        return found

    def body() -> None:
        stock = under(switch=False)
        import fsdp_skip1

        fsdp_skip1.enable()
        ours = under(switch=True)
        assert ours.keys() == stock.keys()
        for moment, image in ours.items():
            assert image == stock[moment], moment

    in_child(body)


def test_a_group_that_cannot_be_restored_does_not_keep_the_others() -> None:
    def body() -> None:
        before = snapshot()
        import fsdp_skip1
        from fsdp_skip1 import unshard

        fsdp_skip1.enable()
        model = altered.small_model()
        altered.train_more(model, 1)
        groups = param_groups(model)
        make_private, broken = unshard.make_private, groups[1].fsdp_params[0]

        def fails(fsdp_param: Any, **kwargs: Any) -> None:
            if fsdp_param is broken:
                raise RuntimeError("out of memory")
            make_private(fsdp_param, **kwargs)

        unshard.make_private = fails
        with Heard() as heard:
            fsdp_skip1.disable()
        assert len(heard.all) == 1 and "out of memory" in heard.all[0], heard.all
        assert traces(groups[0]) == [] and traces(groups[2]) == []
        assert differences(before, "") == []
        assert not any("fsdp_skip1" in name for name in vars(groups[1]))

    in_child(body)


# -- what fires later --------------------------------------------------------------------------------


def test_what_was_kept_from_before_does_what_torch_does() -> None:
    def body() -> None:
        from torch.distributed.fsdp._fully_shard import _fsdp_param_group

        import fsdp_skip1
        from fsdp_skip1.counters import counters

        fsdp_skip1.enable()
        model = altered.small_model()
        altered.train_more(model, 1)
        group = param_groups(model)[0]
        kept = [group.unshard, group.wait_for_unshard, _fsdp_param_group.FSDPParamGroup.unshard]
        reduce = _fsdp_param_group.foreach_reduce
        handle = model[1].unshard(async_op=True)
        fsdp_skip1.disable()
        counters.reset()
        kept[0]()
        kept[1]()
        assert group.is_unsharded and group.fsdp_params[0].all_gather_outputs
        group.reshard()
        kept[2](group)
        group.wait_for_unshard()
        group.reshard()
        handle.wait()
        model[1].reshard()
        _fsdp_param_group.foreach_reduce = reduce
        altered.train_more(model, 1)
        assert set(counters.as_dict().values()) == {0}
        assert [t for g in param_groups(model) for t in traces(g)] == []
        assert altered.leftovers() == []

    in_child(body)


def test_switched_off_in_the_middle_of_a_call() -> None:
    """Between two lines of ours, as another thread may do it; the call goes on as torch's."""

    def body() -> None:
        stock = altered.train()
        import fsdp_skip1
        from fsdp_skip1 import patch, unshard

        model = altered.small_model()
        losses = []
        stands_aside, waits = unshard.Unsharder._must_stand_aside, patch._ours_waits
        for _ in range(3):
            fsdp_skip1.enable()
            called = [0]

            def at_unshard(self: Any, group: Any) -> bool:
                called[0] += 1
                if called[0] == 2:
                    fsdp_skip1.disable()
                return stands_aside(self, group)

            unshard.Unsharder._must_stand_aside = at_unshard
            losses.append(altered.train()[0])
            unshard.Unsharder._must_stand_aside = stands_aside
            assert not fsdp_skip1.is_enabled()
            fsdp_skip1.enable()
            called = [0]

            def at_wait(group: Any) -> bool:
                called[0] += 1
                answer = waits(group)
                if called[0] == 4:  # asked by ``unshard`` and by ``wait_for_unshard``, in turn
                    fsdp_skip1.disable()
                return answer

            patch._ours_waits = at_wait
            losses.append(altered.train()[0])
            patch._ours_waits = waits
            assert not fsdp_skip1.is_enabled()
        assert losses == stock[:1] * 6
        assert altered.leftovers() == []
        assert [t for g in param_groups(model) for t in traces(g)] == []

    in_child(body)


def test_a_switch_under_way_in_another_thread_is_not_taken_for_another_patcher() -> None:
    def body() -> None:
        import fsdp_skip1
        from fsdp_skip1 import patch

        fsdp_skip1.enable()
        with Heard() as heard, patch._changing:
            for point in patch.points():
                point.tidy()
            thread = threading.Thread(target=patch._look_again)
            thread.start()
            thread.join(10)
            assert not thread.is_alive()
        assert heard.all == []
        with Heard() as heard:
            patch._look_again()
        assert len(heard.all) == 1

    in_child(body)


# -- other threads -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIONS)
def test_toggled_by_another_thread_while_it_trains(name: str) -> None:
    def trained() -> list[float]:
        model = altered.small_model(**options(name))
        model.set_modules_to_forward_prefetch([model[0], model[1]])
        return [loss for _ in range(12) for loss in altered.train_more(model, 1)]

    def body() -> None:
        stock = trained()
        import fsdp_skip1

        done, toggles = threading.Event(), [0]
        errors: list[BaseException] = []

        def flip() -> None:
            dice = random.Random(5)
            try:
                while not done.is_set():
                    if dice.random() < 0.6:
                        fsdp_skip1.enable(zero_copy=dice.random() < 0.7)
                    else:
                        fsdp_skip1.disable()
                    toggles[0] += 1
            except BaseException as error:
                errors.append(error)

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        thread = threading.Thread(target=flip)
        with Heard() as heard:
            thread.start()
            try:
                while toggles[0] < 40:
                    assert trained() == stock
            finally:
                done.set()
                thread.join(30)
                sys.setswitchinterval(interval)
        assert not thread.is_alive() and not errors, errors
        assert heard.all == []
        fsdp_skip1.disable()
        assert altered.leftovers() == []

    in_child(body)


def test_forked_while_another_thread_switches_a_group() -> None:
    def body() -> None:
        import fsdp_skip1
        from fsdp_skip1.unshard import lock

        fsdp_skip1.enable()
        model = altered.small_model()
        altered.train_more(model)
        taken, done = threading.Event(), threading.Event()

        def hold() -> None:
            with lock:
                taken.set()
                done.wait(30)

        thread = threading.Thread(target=hold)
        thread.start()
        taken.wait(30)
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # ends it, should it wait for somebody who is not there
            try:
                with torch.no_grad():
                    model(torch.ones(2, 4))
                fsdp_skip1.disable()
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitpid(child, 0)[1]
        done.set()
        thread.join(30)
        assert status == 0

    in_child(body)


def test_toggled_by_another_thread_at_every_line_of_a_step() -> None:
    """Each line of ours, at its first or at its last time, with the first options that reach it."""

    def body() -> None:
        import fsdp_skip1
        from fsdp_skip1 import patch

        tried: set[Place] = set()
        files: set[str] = set()
        missed = 0
        for name in OPTIONS:
            settings = options(name)
            settings["mesh"] = altered.new_mesh(settings.get("mesh", (1,)))
            fsdp_skip1.disable()
            stock = altered.train_more(altered.small_model(**settings), 2)
            fsdp_skip1.enable()
            times: collections.Counter[Place] = collections.Counter()
            for _ in range(2):  # the first time, something is imported and logged
                times.clear()
                with watching(lambda place: times.update([place])):
                    losses = altered.train_more(altered.small_model(**settings), 2)
                assert losses == stock
            places = [place for place in times if place not in tried]
            tried.update(places)
            files.update(Path(file).name for file, _ in places)
            for number, place in enumerate(places):
                when = times[place] if number % 2 else 1
                toggle = Toggle(place, when, again=number % 4 > 1)
                model = altered.small_model(**settings)
                with Heard() as heard, toggle:
                    losses = altered.train_more(model, 2)
                found = (losses == stock, heard.all, altered.leftovers(), left_on(model))
                assert found == (True, [], [], []), (name, place, when)
                missed += not toggle.reached
        assert missed < len(tried) / 20  # what runs now and then only
        expected = {"patch.py", "reduce.py", "unshard.py"}
        if patch.steps_in_one_piece():
            expected |= {"gradients.py", "hooks.py", "roots.py", "steady.py"}
        assert files >= expected

    run_ranks(lambda rank: body(), 1, 120.0, fresh=True)


Place = tuple[str, int]


class Toggle:
    """While it is entered, another thread switches the plugin off at a line, perhaps on again."""

    def __init__(self, place: Place, when: int, *, again: bool) -> None:
        self._again = again
        self.reached = False
        self._seen = 0
        self._thread = threading.Thread(target=self._toggle, daemon=True)
        self._error: BaseException | None = None
        self._place, self._when = place, when
        self._watching = watching(self._look)

    def __enter__(self) -> None:
        import fsdp_skip1

        fsdp_skip1.enable()
        self._watching.__enter__()

    def __exit__(self, *exception: object) -> None:
        import fsdp_skip1

        self._watching.__exit__(None, None, None)
        self.reached = self._thread.ident is not None
        if self.reached:
            self._thread.join(20)
        assert not self._thread.is_alive() and self._error is None, self._error
        fsdp_skip1.disable()

    def _look(self, place: Place) -> None:
        self._seen += place == self._place
        if self._seen == self._when and not self._thread.ident:
            self._thread.start()
            self._thread.join(0.005)  # not to its end where it has to wait for this thread

    def _toggle(self) -> None:
        import fsdp_skip1

        try:
            fsdp_skip1.disable()
            if self._again:
                fsdp_skip1.enable(zero_copy=False)
        except BaseException as error:
            self._error = error


@contextlib.contextmanager
def watching(call: Callable[[Place], Any]) -> Iterator[None]:
    """Have ``call`` called before each line of ours that this thread runs."""

    def at_line(frame: Any, event: str, _: Any) -> Any:
        if event == "line":
            call((frame.f_code.co_filename, frame.f_lineno))
        return at_line

    def at_call(frame: Any, event: str, _: Any) -> Any:
        return at_line if frame.f_globals.get("__name__", "").startswith("fsdp_skip1.") else None

    sys.settrace(at_call)
    try:
        yield
    finally:
        sys.settrace(None)


def left_on(model: Any) -> list[str]:
    """What is left of us on a model: on its groups and among its hooks."""
    hooks = [
        hook
        for module in model.modules()
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    ]
    found = [repr(hook) for hook in hooks if (hook.__module__ or "").startswith("fsdp_skip1")]
    return found + [trace for group in param_groups(model) for trace in traces(group)]
