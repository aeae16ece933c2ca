"""The harness itself: it must see a difference, end a hang, and tell what happened where."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from support import models, shards
from support.arms import PLUGIN, STOCK, Image, Outcome, Run, Scenario, run_arms
from support.counting import counting
from support.ranks import Rank, RankError, run_ranks
from support.results import Ledger, compare_outcomes
from support.steps import train

pytestmark = pytest.mark.scenario


# - Ranks


def test_ranks_return_what_their_body_returns() -> None:
    def body(rank: Rank) -> tuple[int, float]:
        total = torch.tensor([float(rank.rank + 1)])
        dist.all_reduce(total)
        return rank.rank, total.item()

    assert run_ranks(body, world=2) == [(0, 3.0), (1, 3.0)]


def test_a_failing_rank_ends_the_others() -> None:
    def body(rank: Rank) -> None:
        if rank.rank == 1:
            raise ValueError("only here")
        dist.barrier()

    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(body, world=2, timeout=60)
    assert time.monotonic() - start < 30
    message = str(caught.value)
    assert "ValueError: only here" in message
    assert "rank 0 of 2" in message
    assert "rank 1 of 2: exited with 1" in message


def test_a_hang_is_cut_short_with_every_stack() -> None:
    def body(rank: Rank) -> None:
        stuck_in_here(rank)

    def stuck_in_here(rank: Rank) -> None:
        time.sleep(1000)

    with pytest.raises(RankError) as caught:
        run_ranks(body, world=2, timeout=1.0)
    message = str(caught.value)
    assert message.count("hung for 1 s") == 2
    assert message.count("in stuck_in_here") == 2


def test_a_killed_rank_is_reported() -> None:
    def body(rank: Rank) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankError, match="died of SIGKILL"):
        run_ranks(body, world=1)


def test_output_of_a_failed_rank_is_shown() -> None:
    def body(rank: Rank) -> None:
        print("said before the end")
        raise RuntimeError("the end")

    with pytest.raises(RankError, match="said before the end"):
        run_ranks(body, world=1)


def test_the_parent_stays_clean() -> None:
    """No process group, no thread: the next fork depends on it."""
    threads_before = len(list(Path("/proc/self/task").iterdir()))
    run_ranks(lambda rank: None, world=2)
    assert not dist.is_initialized()
    # pytest-xdist talks to its workers in threads of its own.
    expected = threads_before if "PYTEST_XDIST_WORKER" in os.environ else 1
    assert len(list(Path("/proc/self/task").iterdir())) == expected
    assert torch.get_num_threads() == 1


# - Images


@pytest.mark.parametrize(
    ("other", "how"),
    [
        (torch.tensor([1.0, 2.0]), ""),
        (torch.tensor([1.0, 2.0 + 2**-22]), "1 of 2 elements apart"),
        (torch.tensor([1.0, 2.0], dtype=torch.float64), "torch.float64"),
        (torch.tensor([[1.0, 2.0]]), "(1, 2)"),
    ],
)
def test_images_differ_to_the_bit(other: torch.Tensor, how: str) -> None:
    difference = Image.of(other).differs(Image.of(torch.tensor([1.0, 2.0])), layout=True)
    assert bool(difference) == bool(how)
    assert how in difference


def test_images_tell_signed_zeros_and_know_equal_nans() -> None:
    zero, nan = torch.zeros(1), torch.full((1,), torch.nan)
    assert Image.of(zero).differs(Image.of(-zero), layout=False)
    assert not Image.of(nan).differs(Image.of(nan.clone()), layout=False)


def test_images_are_taken_at_once() -> None:
    tensor = torch.zeros(2)
    image = Image.of(tensor)
    tensor.add_(1)
    assert image.tensor().tolist() == [0.0, 0.0]


def test_layout_tells_strides_apart() -> None:
    square = torch.arange(4.0).view(2, 2)
    turned = square.t().contiguous().t()
    assert not Image.of(turned).differs(Image.of(square), layout=False)
    assert "contiguous=False" in Image.of(turned).differs(Image.of(square), layout=True)


def test_records_missing_on_either_side_are_found() -> None:
    one, two = Outcome(), Outcome()
    one.records["a"] = two.records["b"] = Image.of(1)
    problems = compare_outcomes(one, two, "theirs")
    assert len(problems) == 2


# - Arms


def sabotage(run: Run, step: int) -> None:
    """Off by one bit in one gradient, in the plugin arm alone."""
    if run.arm == PLUGIN and step == 1:
        gradient = run.module.head.bias.grad
        local = gradient.to_local()
        local.view(torch.int32)[0] += 1


SABOTAGED = Scenario(
    name="sabotaged",
    shard=shards.blocks(1),
    steps=train(after_backward=sabotage),
)


def test_one_bit_is_enough(ledger) -> None:
    ledger.judge(SABOTAGED, STOCK)
    with pytest.raises(AssertionError, match=r"step 1/grad/head\.bias: 1 of 5 elements apart"):
        ledger.judge(SABOTAGED, PLUGIN)


def leaves_collectives(run: Run) -> None:
    train(2)(run)
    with run.count("more"):
        if run.plugin:
            dist.all_gather_into_tensor(torch.zeros(1), torch.zeros(1))


def test_a_collective_left_over_is_found(ledger) -> None:
    scenario = Scenario(name="leftover", shard=shards.blocks(1), steps=leaves_collectives)
    ledger.judge(scenario, STOCK)
    with pytest.raises(AssertionError, match="more: 1 all_gathers"):
        ledger.judge(scenario, PLUGIN)


def test_arms_see_the_same_seeds() -> None:
    def body(rank: Rank) -> bool:
        scenario = Scenario(
            name="seeds", model=models.stack_of(dropout=0.5), steps=train(2), arms=(STOCK,)
        )
        outcomes = run_arms(scenario, rank)
        return not compare_outcomes(outcomes["stock"], outcomes["plain"], "plain")

    assert run_ranks(body, world=1) == [True]


def test_a_failure_in_one_rank_is_not_taken_for_all() -> None:
    def steps(run: Run) -> None:
        if run.rank == 0:
            raise ValueError("rank 0 alone")

    scenario = Scenario(name="lopsided", steps=steps, world=2, arms=())
    with pytest.raises(AssertionError, match="rank 0 alone"):
        Ledger().outcomes(scenario)


def test_counting_names_what_moves_data() -> None:
    x = torch.ones(3)
    with counting(comms=False) as counts:
        y = x.view(1, 3).t()
        torch.empty(3)
        y.add_(1)
    assert counts.moved == {"aten::add_": 1}
    assert counts.ops["aten::view"] == 1
