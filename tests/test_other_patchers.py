"""Beside others who patch FSDP2: before us and after us, undone in both orders."""

import importlib
import sys
from dataclasses import dataclass
from typing import Any

import pytest
from support import altered, warmup
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

REPLACED = "found FSDPParamGroup.{} replaced by {}support.patchers.{}"


@dataclass(frozen=True)
class Case:
    """One project, the orders it is tried in, and what comes of it."""

    project: str
    orders: tuple[tuple[str, ...], ...]
    #: Words of the one warning if we stand aside; none if we go on working.
    says: tuple[str, ...] = ()


CASES = [
    Case("titan", (*BEFORE, *AFTER)),
    Case("titan", EARLIER, ("replaced", "FSDPParamGroup.unshard by support.patchers.titan._unshard",
                            "FSDPParamGroup.wait_for_unshard by support.patchers.titan._wait")),
    Case("npu", BEFORE, ("found FSDPParamGroup.wait_for_unshard replaced by support.patchers.npu",
                         "expected torch's own method")),
    Case("npu", AFTER, ("FSDPParamGroup.wait_for_unshard by support.patchers.npu",)),
    Case("musa", BEFORE, ("found FSDPParamGroup.unshard replaced by support.patchers.musa.unshard",
                          "expected torch's own method")),
    Case("musa", (*AFTER, EARLY), ("FSDPParamGroup.unshard by support.patchers.musa.unshard",
                                   "FSDPParamGroup.wait_for_unshard by support.patchers.musa.wait")),
    Case("code", BEFORE, ("found FSDPParamGroup.unshard replaced by code of unshard (code.py:",)),
    Case("code", AFTER, ("FSDPParamGroup.unshard by code of unshard (code.py:",)),
    Case("axolotl", (*BEFORE, *AFTER)),
    Case("veomni", (*BEFORE, *AFTER)),
    Case("msprobe", (*BEFORE, *AFTER)),
    Case("simulator", (*BEFORE, *AFTER)),
    Case("profiler", (*BEFORE, *AFTER)),
    Case("helpers", (*BEFORE, *AFTER)),
    Case("keeper", BEFORE),
    Case("keeper", AFTER, ("FSDPParamGroup.wait_for_unshard by support.patchers.keeper",)),
    Case("tracker", (*BEFORE, *AFTER)),
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
            new = altered.small_model()
            losses += [altered.train_more(live, 2), altered.train_more(new, 2)]
            losses += [altered.train(steps=2, reshard_after_forward=False)]
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
        ours, theirs = (t.untyped_storage().data_ptr() for t in (whole, fsdp_param._sharded_param_data))
        if ours == theirs:
            found.append(f"shared memory of {fsdp_param._param_fqn}")
    return found


@pytest.fixture(scope="module")
def stock_losses():
    warmup.load()
    return run_ranks(lambda rank: life("", ("", "", "", "", "")), 1)[0]["losses"]


@pytest.mark.parametrize(
    ("case", "order"),
    [
        pytest.param(case, order, id=f"{case.project}: {' '.join(order)}")
        for case in CASES
        for order in case.orders
    ],
)
def test_beside(case: Case, order: tuple[str, ...], stock_losses) -> None:
    (found,) = run_ranks(lambda rank: life(case.project, order), 1)
    assert found["losses"] == stock_losses
    refused = bool(case.says) and order in BEFORE
    assert found["answers"] == [not refused]
    if case.says:
        assert len(found["heard"]) == 1, found["heard"]
        for words in case.says:
            assert words in found["heard"][0], found["heard"]
    else:
        assert found["heard"] == []
        assert found["skipped"] > 10
    assert found["different"] == []
    assert found["left"] == []
    assert found["of groups"] == []
