"""Runs each scenario once and judges its arms, one test an arm."""

import os
from collections.abc import Iterable

import pytest

from support.arms import COPYING, PLAIN, PLUGIN, STOCK, Outcome, Scenario, run_arms
from support.counting import Counts
from support.faults import fault
from support.features import missing
from support.ranks import Launch

# More ranks than this at a time only get in each other's way.
CORES = min(os.cpu_count() or 1, 8)


class Ledger:
    """Outcomes by scenario, so that the tests of its arms share one run.

    Tests run one after the other, but the ranks of the next scenarios may already be under way:
    as many as there are cores for.
    """

    def __init__(self, ahead: Iterable[Scenario] = ()) -> None:
        self._done: dict[int, list[dict[str, Outcome]] | AssertionError] = {}
        self._launched: dict[int, Launch] = {}
        self._ahead = {id(scenario): scenario for scenario in ahead}
        self._seen: list[Scenario] = []  # ids are taken from scenarios that stay alive
        self._pid = os.getpid()

    def outcomes(self, scenario: Scenario) -> list[dict[str, Outcome]]:
        """Outcomes by rank and arm."""
        key = id(scenario)
        if key not in self._done:
            self._seen.append(scenario)
            self._ahead.pop(key, None)
            launch = self._launched.pop(key, None) or self._launch(scenario)
            self._look_ahead(busy=launch.world)
            try:
                try:
                    self._done[key] = launch.results()
                except FileNotFoundError:  # seen once a worker, under pytest-xdist: run it again
                    self._done[key] = self._launch(scenario).results()
            except AssertionError as error:
                self._done[key] = error
        done = self._done[key]
        if isinstance(done, AssertionError):
            raise AssertionError(str(done))
        return done

    def close(self) -> None:
        for launch in self._launched.values():
            launch.abandon()
        self._launched.clear()

    def _launch(self, scenario: Scenario) -> Launch:
        return Launch(lambda rank: run_arms(scenario, rank), scenario.world, scenario.timeout)

    def _look_ahead(self, busy: int) -> None:
        if os.getpid() != self._pid:
            return  # a forked test: nobody would wait for what it launches
        busy += sum(launch.world for launch in self._launched.values() if not launch.done())
        while self._ahead and busy < CORES and len(self._launched) < 2 * CORES:
            key, scenario = next(iter(self._ahead.items()))
            self._launched[key] = self._launch(self._ahead.pop(key))
            busy += scenario.world

    def judge(self, scenario: Scenario, arm: str) -> None:
        for rank, outcomes in enumerate(self.outcomes(scenario)):
            where = f"{scenario.name}, rank {rank}"
            compare = _compare_to_plain if arm == STOCK else _compare_plugin
            problems = compare(scenario, arm, outcomes)
            assert not problems, f"{where}, {arm}:\n" + "\n".join(problems)


def _compare_to_plain(scenario: Scenario, arm: str, outcomes: dict[str, Outcome]) -> list[str]:
    problems = _errors(outcomes, PLAIN, arm)
    if problems or PLAIN not in outcomes:
        return problems
    return compare_outcomes(outcomes[arm], outcomes[PLAIN], "plain")


def _compare_plugin(scenario: Scenario, arm: str, outcomes: dict[str, Outcome]) -> list[str]:
    stock_is_wrong = bool(scenario.fault) and fault(scenario.fault)
    problems = _errors(outcomes, PLAIN, arm, *(() if stock_is_wrong else (STOCK,)))
    if problems:
        return problems
    if not stock_is_wrong:
        problems += compare_outcomes(outcomes[arm], outcomes[STOCK], "stock", layout=True)
    if PLAIN in outcomes:
        problems += compare_outcomes(outcomes[arm], outcomes[PLAIN], "plain")
    if scenario.size_one:
        problems += _leftovers(outcomes[arm], outcomes.get(PLAIN))
    elif scenario.size_one is False:
        problems += _changes(outcomes[arm], outcomes[STOCK])
    return problems


def _errors(outcomes: dict[str, Outcome], *arms: str) -> list[str]:
    return [
        f"arm {arm} raised\n{outcomes[arm].error}"
        for arm in arms
        if arm in outcomes and outcomes[arm].error
    ]


def compare_outcomes(
    ours: Outcome, theirs: Outcome, name: str, layout: bool = False, limit: int = 12
) -> list[str]:
    """Compares every record, in the order of recording, so that the first fault comes first."""
    problems = []
    for key in _comparable(ours, layout):
        if key not in theirs.records:
            problems.append(f"{key}: recorded here, but not by {name}")
        elif how := ours.records[key].differs(theirs.records[key], layout):
            problems.append(f"{key}: {how} ({name})")
    problems += [
        f"{key}: recorded by {name}, but not here"
        for key in _comparable(theirs, layout)
        if key not in ours.records
    ]
    if len(problems) > limit:
        problems = problems[:limit] + [f"... and {len(problems) - limit} more"]
    return problems


def _comparable(outcome: Outcome, layout: bool) -> list[str]:
    """Records under ``fsdp/`` have no counterpart in a plain module."""
    return [key for key in outcome.records if layout or not key.startswith("fsdp/")]


def _leftovers(outcome: Outcome, plain: Outcome | None) -> list[str]:
    """Collectives over one rank, and copies in and out of their buffers, must be gone.

    What the plain module issues itself (tensor parallelism) stays.
    """
    problems = []
    for key, counts in outcome.counts.items():
        own = plain.counts.get(key, Counts()) if plain else Counts()
        for what in ("all_gathers", "reduce_scatters"):
            left, allowed = getattr(counts, what), getattr(own, what)
            if left != allowed:
                problems.append(f"{key}: {left} {what}, where the module has {allowed} of its own")
        if counts.fsdp_ops:
            problems.append(f"{key}: copy-in or copy-out left: {dict(counts.fsdp_ops)}")
    return problems


def _changes(outcome: Outcome, stock: Outcome) -> list[str]:
    """Where parameters are really sharded, not one operator may differ."""
    problems = []
    for key, counts in outcome.counts.items():
        other = stock.counts[key]
        for what in ("ops", "comms"):
            ours, theirs = getattr(counts, what), getattr(other, what)
            if ours != theirs:
                more, fewer = dict(ours - theirs), dict(theirs - ours)
                problems.append(f"{key}: {what} changed: more {more}, fewer {fewer}")
    return problems


def arm_tests(scenarios: list[Scenario]) -> pytest.MarkDecorator:
    """Parametrizes a test over ``(scenario, arm)``, one test for each arm but plain."""
    names = [scenario.name for scenario in scenarios]
    assert len(set(names)) == len(names), "two scenarios of one name"
    params = []
    for scenario in scenarios:
        for arm in scenario.arms:
            marks = []
            if lacks := missing(scenario.needs):
                marks.append(pytest.mark.skip(reason=f"this torch has no {', '.join(lacks)}"))
            if arm == STOCK and scenario.fault and fault(scenario.fault):
                marks.append(
                    pytest.mark.xfail(reason=scenario.fault, strict=True, raises=AssertionError)
                )
            params.append(pytest.param(scenario, arm, id=f"{scenario.name}-{arm}", marks=marks))
    return pytest.mark.parametrize(("scenario", "arm"), params)


__all__ = ["COPYING", "PLUGIN", "Ledger", "arm_tests", "compare_outcomes"]
