"""The order of work on a device's streams, on the stand-in device.

*Races*: whatever two streams do to the same memory is in order, and of what makes it so nothing
can be left out. *Overlap*: what should run beside compute is not ordered behind it.
"""

import ast
import inspect
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import fsdp_skip1
from fsdp_skip1 import releases
from support import features, models
from support.extensions import HighAndLow, OneTensorNew, OneTensorOld, Quantized, Weight
from support.ranks import Rank, run_ranks
from support.streams import TO_DEVICE, TO_HOST, Kernel
from support.trials import Case, Report, Trial, train

OFFLOAD = {"offload_policy": CPUOffloadPolicy()}
BF16 = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
WIDE = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
DEPTH = 3  # blocks; group 0 is the root, groups 1 to DEPTH are the blocks


# - What users do


def prefetching(depth: int, async_op: bool = False) -> Callable[[Trial], None]:
    """Each block asks for the next ones in forward, and for the ones before it in backward."""

    def drive(trial: Trial) -> None:
        blocks = list(trial.module.blocks)
        for index, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + depth])
            before = blocks[max(0, index - depth) : index]
            block.set_modules_to_backward_prefetch(before[::-1])
            if async_op:
                block._set_unshard_async_op(True)
        train(trial)

    return drive


def ask_for_what_is_over(trial: Trial) -> None:
    """A prefetch that nobody waits for."""
    first, *_, last = trial.module.blocks
    first.set_modules_to_backward_prefetch([last])
    train(trial)


def ask_for_all_at_once(trial: Trial) -> None:
    for step in range(2):
        with trial.phase(f"unshard {step}"):
            for module in (trial.module, *trial.module.blocks):  # in the order of forward
                module.unshard(async_op=True)
        trial.backward(step)
        trial.update()


def switch_in_flight(trial: Trial) -> None:
    """The plugin goes, and comes back, while parameters are on their way."""
    for step in range(3):
        for on in (False, True):
            for block in trial.module.blocks:
                block.unshard(async_op=True)
            trial.switch(on)
        trial.backward(step)
        trial.update()


def swap_in_flight(trial: Trial) -> None:
    """What is on its way is not what the parameters are when it arrives."""
    for step in range(2):
        for block in trial.module.blocks:
            block.unshard(async_op=True)
        state = {key: value * 0.5 for key, value in trial.module.state_dict().items()}
        trial.module.load_state_dict(state, assign=True)
        trial.backward(step)


def add_up(trial: Trial) -> None:
    """Gradients of three microbatches meet on the host."""
    for step in range(3):
        trial.backward(step)
    trial.update()


def add_up_unsharded(trial: Trial) -> None:
    for step in range(4):
        trial.module.set_requires_gradient_sync(step % 2 == 1)
        trial.backward(step)
        if step % 2:
            trial.update()


def add_up_before_all_reduce(trial: Trial) -> None:
    for step in range(6):
        trial.module.set_requires_all_reduce(step % 3 == 2)
        trial.backward(step)
        if step % 3 == 2:
            trial.update()


def optimize_beside(trial: Trial) -> None:
    """The optimizer on a stream of its own, as ``set_post_optim_event`` allows."""
    side = torch.cuda.Stream()
    for step in range(3):
        trial.backward(step)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            trial.optimizer.step()
            trial.optimizer.zero_grad(set_to_none=False)
            trial.module.set_post_optim_event(side.record_event())


def compute_beside(trial: Trial) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        train(trial)


def optimize_in_hooks(trial: Trial) -> None:
    def step(parameter: torch.nn.Parameter) -> None:
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad
        parameter.grad = None

    for parameter in trial.module.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for number in range(2):
        trial.backward(number)


def all_reduce_by_hand(trial: Trial) -> None:
    """A hook in place of replicas, on a stream that the user brings."""
    stream = torch.cuda.Stream()
    for module in (*trial.module.blocks, trial.module):
        module.set_all_reduce_hook(lambda flat: flat.mul_(2), stream=stream)
    train(trial)


class Scaled(Weight):
    """Gathers its data divided by a scale that training code computes on the device."""

    scale = None

    def fsdp_pre_all_gather(self, mesh):
        return (self._data / Scaled.scale,), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        return (outputs[0], ()) if out is None else None


def compute_scales(trial: Trial) -> None:
    Scaled.scale = torch.ones(())
    for step in range(3):
        Scaled.scale.add_(1)
        for block in trial.module.blocks:
            block.unshard(async_op=True)
        trial.backward(step)
        trial.update()


class Bare(torch.nn.Module):
    """One parameter a block: what the transfer needs is just what the block before it frees."""

    def __init__(self):
        super().__init__()
        dim = models.DIM
        self.blocks = torch.nn.Sequential(
            *(torch.nn.Linear(dim, dim, bias=False) for _ in range(DEPTH))
        )
        self.head = torch.nn.Linear(dim, 5)

    def forward(self, x):
        return self.head(self.blocks(x))


def coated(kind: type[Weight]) -> Callable[[], torch.nn.Module]:
    def build() -> torch.nn.Module:
        module = models.Stack(depth=DEPTH)
        for layer in module.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.weight = torch.nn.Parameter(kind(layer.weight.data))
        return module

    return build


HOOK = "FSDPModule.set_all_reduce_hook"
REPLICAS = {"mesh": (2, 1), "world": 2}
CASES = {
    case.name: case
    for case in (
        Case(name="shared", stock=False),
        Case(name="cast", options=WIDE, stock=False),
        Case(name="private", zero_copy=False, stock=False),
        Case(name="hook", drive=all_reduce_by_hand, stock=False, needs=(HOOK,)),
        Case(name="optimizer beside", drive=optimize_beside),
        Case(name="optimizer beside, cast", drive=optimize_beside, options=BF16, stock=False),
        Case(name="optimizer beside, replicas", drive=optimize_beside, stock=False, **REPLICAS),
        Case(name="replicas", stock=False, **REPLICAS),
        Case(name="replicas, cast", options=WIDE, stock=False, **REPLICAS),
        Case(
            name="replicas, later",
            drive=add_up_before_all_reduce,
            options=BF16,
            stock=False,
            **REPLICAS,
        ),
        Case(name="replicas, offloaded, cast", options=OFFLOAD | WIDE, **REPLICAS),
        Case(name="offloaded", options=OFFLOAD),
        Case(name="offloaded, cast", options=OFFLOAD | WIDE),
        Case(name="offloaded, bare", options=OFFLOAD, model=Bare),
        Case(name="offloaded, unpinned", options={"offload_policy": CPUOffloadPolicy(False)}),
        Case(name="offloaded, kept", options=OFFLOAD | {"reshard_after_forward": False}),
        Case(name="offloaded, beside", options=OFFLOAD, drive=compute_beside),
        Case(name="offloaded, prefetch 1", options=OFFLOAD, drive=prefetching(1)),
        Case(name="offloaded, prefetch 2", options=OFFLOAD, drive=prefetching(2)),
        Case(
            name="offloaded, prefetch 1, async",
            options=OFFLOAD,
            drive=prefetching(1, async_op=True),
        ),
        Case(name="offloaded, all at once", options=OFFLOAD, drive=ask_for_all_at_once),
        Case(name="offloaded, switched", options=OFFLOAD, drive=switch_in_flight),
        Case(
            name="offloaded, swapped",
            options=OFFLOAD,
            drive=swap_in_flight,
            stock=features.RELEASE >= (2, 9),  # before that, it gathers too early
        ),
        Case(name="offloaded, in vain", options=OFFLOAD, drive=ask_for_what_is_over, in_vain=True),
        Case(name="offloaded, add up", options=OFFLOAD, drive=add_up),
        Case(name="offloaded, add up unsharded", options=OFFLOAD, drive=add_up_unsharded),
        Case(name="offloaded, hooks", options=OFFLOAD, drive=optimize_in_hooks),
        Case(name="extension", options=OFFLOAD, model=coated(OneTensorNew)),
        Case(name="extension, old", options=OFFLOAD, model=coated(OneTensorOld)),
        Case(name="extension, two", options=OFFLOAD, model=coated(HighAndLow), stock=False),
        Case(name="extension, uneven", options=OFFLOAD, model=coated(Quantized), stock=False),
        Case(
            name="extension, scaled",
            options=OFFLOAD,
            model=coated(Scaled),
            drive=compute_scales,
            stock=False,
        ),
    )
}


# - Running them


Both = tuple[Report, Report | None]  # of the plugin, and of stock


class Reports:
    """Each case runs once for all tests, and those of as many ranks run in the same ranks."""

    def __init__(self) -> None:
        self._done: dict[str, list[Both | str]] = {}

    def of(self, name: str) -> list[Both]:
        """One a rank."""
        case = CASES[name]
        if lacks := features.missing(case.needs):
            pytest.skip(f"this torch has no {', '.join(lacks)}")
        if name not in self._done:
            together = [
                c for c in CASES.values() if c.world == case.world and not features.missing(c.needs)
            ]
            ranks = run_ranks(lambda rank: run_all(together, rank), case.world, timeout=240)
            self._done |= {c.name: [found[c.name] for found in ranks] for c in together}
        errors = [found for found in self._done[name] if isinstance(found, str)]
        assert not errors, "\n".join(errors)
        return self._done[name]

    def one(self, name: str) -> Report:
        return self.of(name)[0][0]


def run_all(cases: list[Case], rank: Rank) -> dict[str, Both | str]:
    done: dict[str, Both | str] = {}
    for case in cases:
        try:
            plugin = case.run(rank)
            done[case.name] = (plugin, case.run(rank, plugin=False) if case.stock else None)
        except Exception:
            done[case.name] = traceback.format_exc()
    return done


@pytest.fixture(scope="module")
def reports(ledger):
    return Reports()


# - Races


@pytest.mark.parametrize("name", CASES)
def test_everything_is_in_order(reports, name):
    for plugin, stock in reports.of(name):
        # What was transferred in vain is thrown away, however much of an update it saw.
        harmless = CASES[name].in_vain
        races = [r for r in plugin.races if not (harmless and "on host" in r and "to device" in r)]
        assert not races, "\n".join(races[:4])
        assert plugin.kernels
        if stock is not None:
            assert plugin.values == stock.values, "the parameters differ from stock's"


def test_stock_forgets_the_optimizer(reports):
    """What is wrong with stock here (see the README) is seen, and was right until 2.8."""
    _, stock = reports.of("optimizer beside")[0]
    assert bool(stock.races) == (features.RELEASE >= (2, 9))
    _, stock = reports.of("offloaded")[0]
    assert not stock.races


# Cases that between them go through every line of the plugin that records an event or waits.
BROKEN = ("offloaded", "extension, scaled", "optimizer beside", "replicas, later")
# Lines that order nothing by themselves.
SPARE = {
    # torch wants an event for it, and waits for ``done``, which is later on the same stream.
    ("early", "reduce.py: reduced = _record(reduce, call.device)"),
    # autograd waits for the streams on which its leaves computed; this is for sums beside those.
    ("early", "steady.py: group._post_reduce_event = stream.record_event()"),
}
WAITS = {"wait_event": "deaf", "wait_stream": "deaf", "_record": "early", "record_event": "early"}


def lines_that_order() -> set[tuple[str, str]]:
    """The plugin's own, with what may be planted there."""
    found = set()
    for path in Path(fsdp_skip1.__file__).parent.glob("*.py"):
        source = path.read_text()
        tree = ast.parse(source)
        functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
        helpers = {id(c) for f in functions if f.name == "_record" for c in ast.walk(f)}
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and id(call) not in helpers:
                name = getattr(call.func, "attr", getattr(call.func, "id", ""))
                if name in WAITS:
                    line = source.splitlines()[call.lineno - 1].strip()
                    found.add((WAITS[name], f"{path.name}: {line}"))
    return found


def plant_each(case: Case, rank: Rank) -> set[tuple[str, str]]:
    """Runs a case once for each line that it goes through, without it; says which ones race."""
    sites = case.run(rank).sites
    faults = [("deaf", site) for site in sites["wait"]]
    faults += [("early", site) for site in sites["record"]]
    return {(fault, site) for fault, site in faults if case.run(rank, **{fault: site}).races}


def test_no_wait_and_no_event_can_be_left_out(reports):
    racing = set()
    for name in BROKEN:
        case = CASES[name]
        for found in run_ranks(lambda rank, case=case: plant_each(case, rank), case.world):
            racing |= found
    assert lines_that_order() - racing == SPARE


def race_with(name: str, **faults: bool) -> list[str]:
    case = CASES[name]
    return run_ranks(lambda rank: case.run(rank, **faults).races, case.world)[0]


@pytest.mark.parametrize("name", ["offloaded, hooks", "offloaded, add up"])
def test_gradients_that_are_read_on_the_host_have_arrived(name):
    races = race_with(name, hasty=True)
    assert any("on host" in race for race in races), races


def test_memory_must_come_from_the_stream_that_uses_it_first():
    """Otherwise a transfer writes where compute still reads."""
    assert not race_with("offloaded, bare")
    assert race_with("offloaded, bare", one_pool=True)


@pytest.mark.parametrize(
    ("name", "forgotten"),
    [
        ("offloaded", "reduce_scatter_input"),
        ("replicas, later", "reduce_scatter_input"),
        ("replicas, offloaded, cast", "all_reduce_input"),
    ],
)
def test_memory_must_be_kept_while_another_stream_reads_it(name, forgotten, monkeypatch):
    original = releases.ReduceLayout.result

    def result(*args, **kwargs):
        given = inspect.signature(original).bind(*args, **kwargs)
        given.arguments[forgotten] = None
        return original(*given.args, **given.kwargs)

    monkeypatch.setattr(releases.ReduceLayout, "result", result)
    assert race_with(name)


# - Overlap

BLOCKS = range(1, DEPTH + 1)


def beside(transfer: Kernel, compute: Kernel) -> bool:
    return not transfer.is_before(compute) and not compute.is_before(transfer)


def assert_beside(transfers: list[Kernel], computes: list[Kernel], issued_before: bool) -> None:
    assert transfers
    assert computes
    for transfer in transfers:
        assert all(beside(transfer, compute) for compute in computes)
        assert not issued_before or transfer.seq < computes[0].seq


def test_forward_overlaps_by_itself(reports):
    """Without prefetching, too: the host is ahead of the device."""
    report = reports.one("offloaded")
    for block in BLOCKS[1:]:
        transfers = report.transfers(block, "forward 1")
        assert_beside(transfers, report.computes(block - 1, "forward 1"), issued_before=False)


@pytest.mark.parametrize("name", ["offloaded", "offloaded, cast", "offloaded, beside", "extension"])
def test_backward_prefetches_by_itself(reports, name):
    report = reports.one(name)
    for block in BLOCKS[:-1]:
        transfers = report.transfers(block, "backward 1")
        assert_beside(transfers, report.computes(block + 1, "backward 1"), issued_before=True)


@pytest.mark.parametrize(
    ("name", "depth"),
    [
        ("offloaded, prefetch 1", 1),
        ("offloaded, prefetch 2", 2),
        ("offloaded, prefetch 1, async", 1),
    ],
)
def test_prefetching_overlaps(reports, name, depth):
    report = reports.one(name)
    for ahead in range(1, depth + 1):
        for block in BLOCKS[:-ahead]:
            transfers = report.transfers(block + ahead, "forward 1")
            assert_beside(transfers, report.computes(block, "forward 1"), issued_before=True)
            transfers = report.transfers(block, "backward 1")
            computes = report.computes(block + ahead, "backward 1")
            assert_beside(transfers, computes, issued_before=True)


def test_explicit_unshards_overlap(reports):
    report = reports.one("offloaded, all at once")
    for block in BLOCKS:
        transfers = report.transfers(block, "unshard 1")
        for other in BLOCKS[: block - 1]:  # what runs before it
            computes = report.computes(other, "forward 1")
            assert_beside(transfers, computes, issued_before=True)


def test_parameters_kept_for_backward_cross_once(reports):
    report = reports.one("offloaded, kept")
    for group in range(DEPTH + 1):
        assert len(report.transfers(group, "forward 1")) == 1
        assert not report.transfers(group, "backward 1")


def test_gradients_overlap(reports):
    """One group's gradients go to the host beside the backward of the group before it."""
    report = reports.one("offloaded")
    copies = [k for k in report.kernels[report.phases["backward 1"]] if k.kind == TO_HOST]
    gradients = {}
    for group in (*reversed(BLOCKS), 0):  # no gradient leaves the root until all is over
        count = report.groups[group].params
        gradients[group], copies = copies[:count], copies[count:]
    assert not copies
    for block in BLOCKS[1:]:
        assert_beside(gradients[block], report.computes(block - 1, "backward 1"), False)


# - What it may cost


@pytest.mark.parametrize(
    "name", [n for n, c in CASES.items() if "offload_policy" in c.options and c.stock]
)
def test_the_host_waits_no_more_than_in_stock(reports, name):
    for plugin, stock in reports.of(name):
        assert sum(plugin.host_waits.values()) <= sum(stock.host_waits.values())


@pytest.mark.parametrize(
    ("name", "depth"),
    [("offloaded", 1), ("offloaded, prefetch 1", 1), ("offloaded, prefetch 2", 2)],
)
def test_memory_in_flight_is_that_of_the_groups_asked_for(reports, name, depth):
    report = reports.one(name)
    assert report.staging_peak == depth * max(group.nbytes for group in report.groups)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_memory_stays_below_that_of_two_shards(depth):
    drive = prefetching(depth) if depth else train
    one = Case(name="one", options=OFFLOAD, drive=drive)
    two = Case(name="two", options=OFFLOAD, drive=drive, mesh=(2,), world=2)
    ours = run_ranks(lambda rank: one.run(rank).peak, 1)[0]
    stock = run_ranks(lambda rank: two.run(rank, plugin=False).peak, 2)[0]
    assert ours <= stock


def test_a_prefetch_in_vain_leaves_nothing_behind(reports):
    plugin, stock = reports.of("offloaded, in vain")[0]
    last = plugin.transfers(DEPTH, "backward 1")
    assert len(last) == 2, "the prefetch did not happen"
    assert plugin.staging_left == 0
    assert plugin.left <= stock.left
