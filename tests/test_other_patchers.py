"""Beside others who patch FSDP2: before us and after us, undone in both orders."""

import importlib
import sys
from dataclasses import dataclass
from typing import Any

import pytest
from support import altered
from support.altered import Heard
from support.arms import param_groups
from support.ranks import run_ranks

# What happens, in order; after each, a model from before trains on and a new one is trained.
THEY_FIRST = ("import", "them", "us", "-us", "-them")
THEY_INSIDE = ("import", "them", "us", "-them", "-us")
THEY_LAST = ("us", "import", "them", "-them", "-us")
THEY_OUTSIDE = ("us", "import", "them", "-us", "-them")
# Imported before us, installed after us: what it takes for the original is torch's.
EARLY = ("import", "us", "them", "-them", "-us")
EARLY_OUTSIDE = ("import", "us", "them", "-us", "-them")

BEFORE = (THEY_FIRST, THEY_INSIDE)
AFTER = (THEY_LAST, THEY_OUTSIDE)
EARLIER = (EARLY, EARLY_OUTSIDE)


@dataclass(frozen=True)
class Case:
    """One project, the orders it is tried in, and what comes of it."""

    project: str
    orders: tuple[tuple[str, ...], ...]
    #: Words of the one warning; none if there is nothing to say.
    says: tuple[str, ...] = ()
    #: Whether the plugin goes on working while they are there.
    works: bool = True


AROUND_WAIT = ("titan", "veomni", "simulator", "profiler", "helpers", "tracker")
BACK = (
    "put torch's own {} back. What goes through there is left to that code. To have it back, call"
)

CASES = [
    Case("titan", (THEY_FIRST, *AFTER)),
    Case("titan", (THEY_INSIDE,), (BACK.format(
        "FSDPParamGroup.unshard, FSDPParamGroup.wait_for_unshard, "
        "_fsdp_param_group.foreach_reduce, _fsdp_collectives.foreach_reduce"),)),
    Case("titan", EARLIER, (
        "somebody replaced FSDPParamGroup.unshard by support.patchers.titan._unshard (titan.py:",
        "FSDPParamGroup.wait_for_unshard by support.patchers.titan._wait_for_unshard (titan.py:",
    ), works=False),
    Case("npu", BEFORE, (
        "found FSDPParamGroup.wait_for_unshard replaced by support.patchers.npu.wait_for_unshard",
        "expected torch's own method",
    ), works=False),
    Case("npu", AFTER, (
        "FSDPParamGroup.wait_for_unshard by support.patchers.npu.wait_for_unshard (npu.py:",
    ), works=False),
    Case("musa", BEFORE, (
        "found FSDPParamGroup.unshard replaced by support.patchers.musa.unshard (musa.py:",
        "expected torch's own method",
    ), works=False),
    Case("musa", (*AFTER, EARLY), (
        "FSDPParamGroup.unshard by support.patchers.musa.unshard (musa.py:",
        "FSDPParamGroup.wait_for_unshard by support.patchers.musa.wait_for_unshard (musa.py:",
    ), works=False),
    Case("code", BEFORE, (
        "found FSDPParamGroup.unshard replaced by code of unshard (code.py:",
    ), works=False),
    Case("code", AFTER, (
        "somebody replaced FSDPParamGroup.unshard by code of unshard (code.py:",
        "FSDPParamGroup.wait_for_unshard by code of wait_for_unshard (code.py:",
    ), works=False),
    Case("axolotl", (*BEFORE, *AFTER)),
    Case("veomni", (THEY_FIRST, *AFTER)),
    Case("veomni", (THEY_INSIDE,), (BACK.format("FSDPParamGroup.wait_for_unshard"),)),
    Case("msprobe", (THEY_FIRST, *AFTER)),
    Case("msprobe", (THEY_INSIDE,), (BACK.format(
        "_fsdp_param_group.foreach_reduce, _fsdp_collectives.foreach_reduce"),)),
    Case("simulator", (THEY_FIRST, *AFTER)),
    Case("simulator", (THEY_INSIDE,), (BACK.format(
        "FSDPParamGroup.unshard, FSDPParamGroup.wait_for_unshard"),)),
    Case("profiler", (THEY_FIRST, *AFTER)),
    Case("profiler", (THEY_INSIDE,), (BACK.format(
        "FSDPParamGroup.unshard, FSDPParamGroup.wait_for_unshard"),)),
    Case("helpers", (THEY_FIRST, *AFTER)),
    Case("helpers", (THEY_INSIDE,), (BACK.format(
        "FSDPParamGroup.unshard, FSDPParamGroup.wait_for_unshard, "
        "_fsdp_param_group.foreach_reduce"),)),
    # Looks like a wrapper, so we go around it; after us it shows that it does not call ours.
    Case("keeper", (THEY_FIRST,)),
    Case("keeper", (THEY_INSIDE,), (BACK.format("FSDPParamGroup.wait_for_unshard"),)),
    Case("keeper", AFTER, (
        "somebody replaced FSDPParamGroup.wait_for_unshard by support.patchers.keeper.install",
    ), works=False),
    Case("tracker", (*BEFORE, *AFTER)),
    Case("hooks", (*BEFORE, *AFTER)),
]  # fmt: skip


def snapshot() -> dict[tuple[Any, str], Any]:
    """What is stored in torch's modules and classes, by owner and name."""
    from torch.distributed.fsdp._fully_shard import (
        _fsdp_collectives,
        _fsdp_param,
        _fsdp_param_group,
        _fsdp_state,
    )

    owners = [
        _fsdp_collectives,
        _fsdp_param_group,
        _fsdp_state,
        _fsdp_param.FSDPParam,
        _fsdp_param_group.FSDPParamGroup,
        _fsdp_state.FSDPState,
    ]
    return {(owner, name): value for owner in owners for name, value in vars(owner).items()}


def differences(before: dict[tuple[Any, str], Any], reloaded: str) -> list[str]:
    """What is not the very object it was; a module that was reloaded has new ones."""
    found = []
    for (owner, name), value in before.items():
        same = vars(owner).get(name) is value
        if not same and not (owner.__name__ == reloaded and name != "foreach_reduce"):
            found.append(f"{owner.__name__}.{name} is {vars(owner).get(name)!r}")
    return found


def life(project: str, order: tuple[str, ...]) -> dict[str, Any]:
    """Trains through the whole order, in a process of its own."""
    before = snapshot()
    patcher: Any = None
    live = altered.small_model()
    losses = [altered.train_more(live, 1)]
    answers, skipped, calls = [], 0, 0
    at_work: set[str] = set()
    with Heard() as heard:
        for event in order:
            if event == "import" and project:
                patcher = importlib.import_module(f"support.patchers.{project}")
            elif event == "them" and project:
                patcher.install()
            elif event == "-them" and project:
                patcher.undo()
            elif event == "us":
                import fsdp_skip1

                answers.append(fsdp_skip1.enable())
            elif event == "-us":
                fsdp_skip1.disable()
            at_work ^= {event.removeprefix("-")} & {"us", "them"}
            both = at_work == {"us", "them"}
            if both:
                counters = sys.modules["fsdp_skip1.counters"].counters
                skipped, calls = counters.all_gathers, patcher.calls
            new = altered.small_model(reshard_after_forward=event.startswith("-"))
            losses += [altered.train_more(live, 1), altered.train_more(new, 2)]
            if both:
                skipped = counters.all_gathers - skipped
                calls = patcher.calls - calls
    if not project:
        return {"losses": losses}
    return {
        "losses": losses,
        "answers": answers,
        "heard": heard.all,
        "skipped": skipped,
        "calls": calls,
        "different": differences(before, _reloaded(project)),
        "left": altered.leftovers(),
        "of groups": [x for model in (live, new) for g in param_groups(model) for x in traces(g)],
    }


def _reloaded(project: str) -> str:
    return f"{altered.FSDP2}._fsdp_param_group" if project == "msprobe" else ""


def traces(group: Any) -> list[str]:
    """What is left of us on a group: attributes, and memory that is still shared."""
    found = [k for k, v in vars(group).items() if "fsdp_skip1" in f"{k} {type(v).__module__}"]
    for fsdp_param in group.fsdp_params:
        whole = getattr(fsdp_param, "_unsharded_param", None)
        if whole is None:
            continue
        if not fsdp_param.all_gather_outputs:
            found.append(f"no buffer of {fsdp_param._param_fqn}")
        ours, theirs = (
            t.untyped_storage().data_ptr() for t in (whole, fsdp_param._sharded_param_data)
        )
        if ours == theirs:
            found.append(f"shared memory of {fsdp_param._param_fqn}")
    return found


@pytest.fixture(scope="module")
def stock_losses():
    altered.prepare()
    return run_ranks(lambda rank: life("", ("", "", "", "", "")), 1, fresh=True)[0]["losses"]


@pytest.mark.parametrize(
    ("case", "order"),
    [
        pytest.param(case, order, id=f"{case.project}: {' '.join(order)}")
        for case in CASES
        for order in case.orders
    ],
)
def test_beside(case: Case, order: tuple[str, ...], stock_losses) -> None:
    (found,) = run_ranks(lambda rank: life(case.project, order), 1, fresh=True)
    assert found["losses"] == stock_losses
    assert found["answers"] == [case.works or order not in BEFORE]
    assert len(found["heard"]) == (1 if case.says else 0), found["heard"]
    for words in case.says:
        assert words in found["heard"][0], found["heard"]
    if case.works:
        # Through somebody else's ``wait_for_unshard`` each group is tried out with torch's unshard.
        tried = case.project in AROUND_WAIT and (order in AFTER or case.project == "tracker")
        assert found["skipped"] >= (5 if tried else 11)
    assert found["different"] == []
    assert found["left"] == []
    assert found["of groups"] == []


@pytest.mark.parametrize("first", ["us", "them"])
def test_code_of_others_runs_as_often_as_without_us(first: str) -> None:
    """What saves overhead goes around torch's code, and never around somebody else's."""

    def body() -> tuple[dict[str, int], dict[str, int]]:
        from support.patchers import hooks

        hooks.install()
        train_variously()
        without = dict(hooks.counts)
        hooks.undo()
        hooks.counts.clear()
        import fsdp_skip1

        if first == "us":
            model = altered.small_model()
            altered.train_more(model, 1)  # adopted before they come
            hooks.install()
        else:
            fsdp_skip1.disable()
            hooks.install()
            fsdp_skip1.enable()
        from fsdp_skip1.counters import counters

        counters.reset()
        train_variously()
        assert counters.all_gathers > 10
        return without, dict(hooks.counts)

    ((without, beside),) = run_ranks(lambda rank: body(), 1, fresh=True)
    # Ranges around what is skipped are skipped with it, and so is the memory that is not freed.
    for name in ("record_function", "to_sharded_dtensor"):
        without.pop(name), beside.pop(name)
    assert beside == without


def train_variously() -> None:
    altered.train()
    altered.train(reshard_after_forward=False)
    altered.train(mesh=(1, 1))
