"""What `explain`, `status`, `stats`, the log and `fsdp-skip1 doctor` say, against what happens."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import subprocess
import sys
import textwrap
from functools import wraps
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils._pytree import tree_leaves

import fsdp_skip1
from support import features, models, standins
from support.counting import OpCounter, moves_data
from support.ranks import run_ranks

ROOT = Path(__file__).parents[1]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DIM = models.DIM
MIXED = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32, output_dtype=FP32)

# Sizes of the groups of `stack()`: a block is a norm, up with bias and down without.
BLOCK = DIM * 2 + (DIM * 12 + 12) + 12 * DIM
HEAD = DIM * 5 + 5


def in_ranks(world: int = 1):
    """Makes a test of what runs in forked ranks; each must come to an end well."""

    def decorate(body):
        def run(rank):
            if features.RELEASE < (2, 7):
                standins.install_copy_out()
            fsdp_skip1.enable()
            body(rank)

        def test():
            run_ranks(run, world)

        test.__name__ = body.__name__
        return pytest.mark.scenario(test)

    return decorate


def mesh(*shape: int, names: tuple[str, ...] | None = None):
    names = names or ("replicate", "shard")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def stack(on=None, *, dtype=FP32, inner=None, **options) -> models.Stack:
    """A model of two blocks and a head, each block a group, the head in the root's."""
    torch.manual_seed(0)
    module = models.Stack().to(dtype)
    on = on or mesh(1)
    for block in module.blocks:
        fully_shard(block, mesh=on, **{**options, **(inner or {})})
    fully_shard(module, mesh=on, **options)
    return module


def step(module: nn.Module, dtype=FP32) -> None:
    module(torch.ones(2, DIM, dtype=dtype)).float().sum().backward()
    module.zero_grad()


def rows(module: nn.Module) -> dict:
    return {row.fqn: row for row in fsdp_skip1.explain(module).groups}


def table(module: nn.Module) -> list[list[str]]:
    """The cells of the printed table, a list a line, without rules."""
    lines = str(fsdp_skip1.explain(module)).split("\n\n")[1].splitlines()
    assert set(lines[1]) == {"-", " "}
    starts = [i for i, c in enumerate(lines[1]) if c == "-" and (i == 0 or lines[1][i - 1] == " ")]
    ends = [*starts[1:], None]
    cut = [[line[a:b].strip() for a, b in zip(starts, ends)] for line in lines]
    return [cells for cells in cut if not set("".join(cells)) <= {"-"}]


def notes(module: nn.Module) -> list[str]:
    return str(fsdp_skip1.explain(module)).split("\n\n")[2].splitlines()


# --- explain ----------------------------------------------------------------------------------


@in_ranks()
def test_the_table_before_and_after_the_first_forward(rank):
    module = stack(inner={"mp_policy": MIXED})
    before = fsdp_skip1.explain(module)
    assert not before.initialized
    assert "Before the first forward" in str(before)
    assert [row.adopted for row in before.groups] == [False] * 3

    step(module)
    after = fsdp_skip1.explain(module)
    assert after.initialized
    assert "first forward" not in str(after)
    assert [row.adopted for row in after.groups] == [True] * 3
    unadopted = [{**row.to_dict(), "adopted": False} for row in after.groups]
    assert unadopted == [row.to_dict() for row in before.groups]

    head, *lines, total = table(module)
    assert head == [
        "parameter group",
        "mesh",
        "params",
        "size",
        "unshard",
        "reduce",
        "saved a step",
    ]
    assert [line[:6] for line in lines] == [
        ["(model)", "shard 1", "2", f"{4 * HEAD} B", "shared", "handed over"],
        ["blocks.0", "shard 1", "5", f"{4 * BLOCK} B", "cast", "cast"],
        ["blocks.1", "shard 1", "5", f"{4 * BLOCK} B", "cast", "cast"],
    ]
    size = f"{4 * (HEAD + 2 * BLOCK) / 1024:.1f} KiB"
    assert total[:5] == ["3 in all", "", "12", size, "2 shared, 10 cast"]
    said = notes(module)
    assert "unshard cast: kept in float32, computed in bfloat16 [blocks.0, blocks.1]" in said
    assert "reduce cast: from bfloat16 to float32 [blocks.0, blocks.1]" in said
    assert "left to torch" not in str(after)


@in_ranks()
def test_to_dict_is_json_and_says_the_same(rank):
    module = stack()
    step(module)
    explanation = fsdp_skip1.explain(module)
    found = json.loads(json.dumps(explanation.to_dict()))
    assert found["torch"] == torch.__version__
    assert found["rank"] == 0
    assert found["on"]
    assert found["why"] == "enable() was called"
    assert found["message"] is None
    root, block, _ = found["groups"]
    assert (root["fqn"], block["fqn"]) == ("", "blocks.0")
    assert root["mesh"] == {"shard": 1}
    assert root["shard_size"] == 1
    assert root["replicas"] == 1
    assert block["unshard"] == {"shared": 5}
    assert block["unshard_bytes"] == {"shared": 4 * BLOCK}
    assert block["reduce"] == "handed over"
    assert block["left_to_torch"] == []
    total = found["totals"]
    assert total["unshard"] == {"shared": 12}
    assert total["groups_left_to_torch"] == 0
    assert total["bytes"] == sum(row["bytes"] for row in found["groups"]) == 4 * (HEAD + 2 * BLOCK)
    assert total["launches_saved"] == sum(row["launches_saved"] for row in found["groups"]) > 0


@in_ranks()
def test_off_it_says_what_would_run(rank):
    module = stack()
    step(module)
    on = fsdp_skip1.explain(module)
    fsdp_skip1.disable()
    off = fsdp_skip1.explain(module)
    assert "off (disable() was called), so this is what it would do" in str(off)
    assert not off.on
    assert not any(row.adopted for row in off.groups)
    assert [{**row.to_dict(), "adopted": True} for row in off.groups] == [
        row.to_dict() for row in on.groups
    ]


@in_ranks()
def test_zero_copy_false(rank):
    module = stack()
    shared = rows(module)[""].bytes_saved
    fsdp_skip1.enable(zero_copy=False)
    for _ in range(2):
        root = rows(module)[""]
        assert root.unshard == {"copied": 2}
        assert root.bytes_saved == shared - 4 * HEAD
        step(module)
    assert "unshard copied: zero_copy=False keeps a private copy" in notes(module)


def test_without_fsdp2():
    plain = fsdp_skip1.explain(nn.Linear(2, 2))
    assert plain.groups == ()
    assert plain.totals()["groups"] == 0
    assert str(plain).startswith("Linear has no FSDP2 module: neither fully_shard() nor ")
    assert json.loads(json.dumps(plain.to_dict()))["message"] == str(plain)

    class FullyShardedDataParallel(nn.Sequential):
        pass

    first = fsdp_skip1.explain(nn.Sequential(FullyShardedDataParallel(nn.Linear(2, 2))))
    assert str(first).startswith("Sequential has no FSDP2 module. It is wrapped in FSDP1 ")
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module, not dict"):
        fsdp_skip1.explain({})


@in_ranks(2)
def test_mixed_meshes_on_any_rank(rank):
    module = models.Stack()
    hsdp = mesh(2, 1, names=("dp_replicate", "dp_shard"))
    fully_shard(module.blocks[0], mesh=mesh(2))
    fully_shard(module.blocks[1], mesh=hsdp)
    fully_shard(module, mesh=hsdp["dp_shard"])
    for _ in range(2):
        explanation = fsdp_skip1.explain(module)
        assert explanation.rank == rank.rank
        assert f"rank {rank.rank}: on" in str(explanation)
        root, sharded, replicated = explanation.groups
        assert sharded.mesh == {"shard": 2}
        assert sharded.shard_size == 2
        assert sharded.unshard == {"left to torch": 5}
        assert sharded.reduce == "left to torch"
        assert sharded.bytes == replicated.bytes == 4 * BLOCK  # whole, not one rank's shard
        (left,) = sharded.left_to_torch
        assert left.what == "unshard and reduction"
        assert left.reason == "the shard mesh has size 2"
        assert left.way_out
        assert left.way_out in str(explanation)
        assert sharded.launches_saved == sharded.bytes_saved == 0
        assert replicated.mesh == {"replicate": 2, "shard": 1}
        assert replicated.replicas == 2
        assert replicated.mesh_names == {"replicate": "dp_replicate", "shard": "dp_shard"}
        assert replicated.unshard == {"shared": 5}
        assert replicated.reduce == "all-reduce over 2 replicas"
        assert replicated.reduce_reason == "gradients are averaged, in float32"
        assert root.reduce == "handed over"
        assert root.mesh == {"shard": 1}
        assert explanation.totals()["groups_left_to_torch"] == 1
        step(module)
    sharded = [line for line in table(module) if line[0] == "blocks.0"]
    assert sharded == [
        ["blocks.0", "shard 2", "5", f"{4 * BLOCK} B", *["left to torch"] * 2, "nothing"]
    ]


@in_ranks()
def test_ways_to_unshard(rank):
    from support.extensions import OneTensorOld

    class WithExtension(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(OneTensorOld(torch.ones(DIM, DIM)))
            self.bias = nn.Parameter(torch.ones(DIM))

    module = WithExtension()
    fully_shard(module, mesh=mesh(1))
    (row,) = fsdp_skip1.explain(module).groups
    assert row.unshard == {"extension": 1, "shared": 1}
    assert row.unshard_reasons == {"extension": ["OneTensorOld brings its own all-gather hooks"]}
    assert table(module)[1][4] == "1 extension, 1 shared"

    # No second device here: what the group computes on is only said to be another one.
    offloaded = nn.Linear(DIM, DIM)
    fully_shard(offloaded, mesh=mesh(1), offload_policy=CPUOffloadPolicy(pin_memory=False))
    for fsdp_param in fully_shard.state(offloaded)._fsdp_param_group.fsdp_params:
        fsdp_param.device = torch.device("cuda", 0)
    (row,) = fsdp_skip1.explain(offloaded).groups
    assert row.unshard == {"transferred": 2}
    assert row.unshard_reasons == {"transferred": ["offloaded to cpu, computed on cuda:0"]}


@in_ranks()
def test_ways_to_reduce(rank):
    module = stack()
    module.blocks[0].requires_grad_(False)
    if features.has("FSDPModule.set_all_reduce_hook"):
        module.blocks[1].set_all_reduce_hook(lambda grad: None)
        assert rows(module)["blocks.1"].reduce == "all-reduce hook"
    factor = features.has("reduce divide factor")
    if factor:
        features.set_divide_factor(module, 4.0)
    for _ in range(2):
        found = rows(module)
        assert found["blocks.0"].reduce == "nothing to reduce"
        assert found["blocks.0"].reduce_reason == "every parameter is frozen"
        assert found[""].reduce == ("divided" if factor else "handed over")
        if factor:
            assert found[""].reduce_reason.startswith("by 4,")
        step(module)


@in_ranks()
def test_names_of_shared_and_grouped_modules(rank):
    shared = models.Shared()
    fully_shard(shared.first, mesh=mesh(1))
    fully_shard(shared, mesh=mesh(1))
    assert list(rows(shared)) == ["", "first"]
    inner = models.Stack()
    fully_shard([inner.blocks[0], inner.head], mesh=mesh(1))
    fully_shard(inner.blocks[1], mesh=mesh(1))
    outer = nn.Sequential(nn.Identity(), inner)  # no FSDP2 module itself: each of the two is a root
    assert list(rows(outer)) == ["1.blocks.0, 1.head", "1.blocks.1"]


@in_ranks()
def test_replicate(rank):
    if not features.has("replicate mesh argument"):
        return
    from torch.distributed._composable.replicate_with_fsdp import replicate

    module = models.Stack()
    replicate(module, mesh=mesh(1, names=("replicate",)))
    for _ in range(2):
        (row,) = fsdp_skip1.explain(module).groups
        assert row.mesh == {"replicate": 1}
        assert row.shard_size == 1
        assert row.unshard == {"shared": 12}
        assert row.reduce == "handed over"
        assert table(module)[1][1] == "replicate 1"
        step(module)


# - What it says is what runs


class Meter(OpCounter):
    """Counts operators that move data, and the bytes that they write."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = 0
        self.nbytes = 0
        # Kept, so that no other tensor gets their addresses.
        self.scattered: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        name = func._schema.name
        if result is NotImplemented or not moves_data(func, name):
            return result
        if name.startswith("c10d::_reduce_scatter"):
            self.scattered[args[0].data_ptr()] = args[0]
        elif name == "aten::copy_" and args[0].data_ptr() in self.scattered:
            return result  # gloo's own, which FSDP2 does not ask for
        self.launches += 1
        if name.startswith("c10d::_allgather"):
            return result  # in place
        if name.startswith("c10d::"):
            written = args[0]
        elif name == "fsdp::all_gather_copy_in":
            written = result[0]
        elif name == "fsdp::split_with_sizes_copy":
            written = kwargs["out"]
        else:
            arguments = func._schema.arguments
            given = {**dict(zip((a.name for a in arguments), args)), **(kwargs or {})}
            changes = [a.name for a in arguments if a.alias_info and a.alias_info.is_write]
            written = [given[name] for name in changes] or result
        self.nbytes += sum(t.nbytes for t in tree_leaves(written) if isinstance(t, torch.Tensor))
        return result


CASES = {
    "fp32": {},
    "kept for backward": {"reshard_after_forward": False},
    "bf16 parameters": {"mp_policy": MixedPrecisionPolicy(param_dtype=BF16)},
    "bf16, reduced in fp32": {
        "mp_policy": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    },
    "fp32, reduced in bf16": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=BF16)},
    "bf16 model, reduced in fp32": {
        "dtype": BF16,
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=FP32),
    },
    "fp16 parameters": {"mp_policy": MixedPrecisionPolicy(param_dtype=FP16)},
    "mesh (1, 1)": {"shape": (1, 1)},
    "divided": {"factor": 4.0},
    "divided by one": {"factor": 1.0},
    "divided, bf16": {
        "factor": 4.0,
        "mp_policy": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32),
    },
    "copied": {"zero_copy": False},
}


@in_ranks()
def test_savings_are_what_stock_does_more(rank):
    wrong = []
    for name, case in CASES.items():
        if not _stock_can(case):
            continue
        fsdp_skip1.disable()
        stock, _ = _metered_step(case)
        fsdp_skip1.enable(zero_copy=case.get("zero_copy", True))
        ours, said = _metered_step(case)
        saved = stock.launches - ours.launches, stock.nbytes - ours.nbytes
        if saved != (said["launches_saved"], said["bytes_saved"]):
            wrong.append(f"{name}: {saved} saved, {said} said; {stock.ops} {ours.ops}")
    assert not wrong, "\n".join(wrong)


def _stock_can(case: dict) -> bool:
    if case.get("factor") == 4.0 and features.RELEASE == (2, 9):
        return False  # it asks gloo for a reduction that there is not
    if "shape" in case and features.RELEASE < (2, 8):
        return False  # gloo cannot average there
    return "factor" not in case or features.has("reduce divide factor")


def _metered_step(case: dict) -> tuple[Meter, dict]:
    options = {name: case[name] for name in case if name not in ("shape", "factor", "zero_copy")}
    dtype = case.get("dtype", FP32)
    module = stack(mesh(*case.get("shape", (1,))), **options)
    for inner in module.modules():
        if "factor" in case and isinstance(inner, FSDPModule):
            features.set_divide_factor(inner, case["factor"])
    foreseen = fsdp_skip1.explain(module).totals()
    step(module, dtype)
    with Meter() as meter:
        step(module, dtype)
    assert foreseen == fsdp_skip1.explain(module).totals()
    return meter, foreseen


@in_ranks()
def test_shared_means_that_memory_is_shared(rank):
    module = stack(inner={"mp_policy": MIXED})
    seen = {}

    def look(name):
        def hook(inner, args):
            group = fully_shard.state(inner)._fsdp_param_group
            seen[name] = [
                p.unsharded_param.data_ptr() == p._sharded_param_data.data_ptr()
                for p in group.fsdp_params
            ]

        return hook

    for name, inner in [("", module), *module.named_modules()]:
        if isinstance(inner, FSDPModule):
            inner.register_forward_pre_hook(look(name))
    step(module)
    assert seen == {
        name: [how == "shared" for how, n in row.unshard.items() for _ in range(n)]
        for name, row in rows(module).items()
    }
    assert len(seen) == 3
    assert any(seen[""])
    assert not any(seen["blocks.0"])


# - Left to torch


@in_ranks()
def test_a_torch_that_is_not_understood(rank):
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    module = stack()
    fsdp_skip1.disable()
    del FSDPParam.init_unsharded_param
    with pytest.warns(fsdp_skip1.FsdpSkip1Warning):
        assert not fsdp_skip1.enable()
    explanation = fsdp_skip1.explain(module)
    assert "wanted (enable() was called), but it does not work here" in str(explanation)
    for row in explanation.groups:
        (left,) = row.left_to_torch
        assert left.reason.startswith("this torch is not understood: ")
        assert "init_unsharded_param" in left.reason
        assert left.way_out
        assert row.unshard == {"left to torch": row.parameters}
        assert row.mesh == {"shard": 1}
        assert row.launches_saved == 0
    status = fsdp_skip1.status()
    assert not status.on
    assert "init_unsharded_param" in status.obstacle
    assert "but off: this torch is not understood" in str(status)


@in_ranks()
def test_a_reduction_that_is_not_torchs(rank):
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group

    fsdp_skip1.disable()

    def stranger(*args, **kwargs):
        raise NotImplementedError

    _fsdp_param_group.foreach_reduce = _fsdp_collectives.foreach_reduce = stranger
    with pytest.warns(fsdp_skip1.FsdpSkip1Warning, match="reduction of gradients alone"):
        assert fsdp_skip1.enable()
    module = stack()
    row = rows(module)["blocks.0"]
    assert row.unshard == {"shared": 5}
    assert row.reduce == "left to torch"
    (left,) = row.left_to_torch
    assert left.what == "reduction"
    assert "stranger" in left.reason
    assert left.way_out
    assert fsdp_skip1.status().reduction.startswith("left to torch: ")
    assert row.launches_saved > 0


@in_ranks()
def test_others_who_replace_and_wrap(rank):
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    ours = vars(FSDPParamGroup)["unshard"]

    @wraps(ours)
    def neighbour(self, *args, **kwargs):
        return ours(self, *args, **kwargs)

    FSDPParamGroup.unshard = neighbour
    (point,) = [
        p for p in fsdp_skip1.status().patched if p.target.endswith("FSDPParamGroup.unshard")
    ]
    assert point.holds
    assert len(point.others) == 1
    assert "test_others_who_replace_and_wrap.<locals>.neighbour" in point.others[0] or (
        sys.version_info < (3, 11) and "neighbour" in point.others[0]
    )
    assert "unshard (wrapped by test_report." in str(fsdp_skip1.status())
    module = stack()
    assert rows(module)["blocks.0"].unshard == {"shared": 5}

    def stranger(self, async_op=False):
        raise NotImplementedError

    FSDPParamGroup.unshard = stranger
    (point,) = [
        p for p in fsdp_skip1.status().patched if p.target.endswith("FSDPParamGroup.unshard")
    ]
    assert not point.holds
    assert "stranger" in point.others[0]
    assert "unshard NO LONGER HOLDS (replaced by " in str(fsdp_skip1.status())
    row = rows(module)["blocks.0"]
    (left,) = row.left_to_torch
    assert left.what == "unshard"
    assert "stranger" in left.reason
    assert left.way_out
    assert row.unshard == {"left to torch": 5}
    assert row.reduce == "handed over"


# --- status and stats -------------------------------------------------------------------------


@in_ranks()
def test_status_on_and_off(rank):
    fsdp_skip1.enable()
    status = fsdp_skip1.status()
    assert status.on
    assert not status.waiting
    assert status.obstacle is None
    assert status.zero_copy
    assert status.why == "enable() was called"
    assert status.torch == torch.__version__
    assert status.reduction == "patched"
    assert status.trims
    unproven = {"steady"} if torch.__version__.startswith("2.6.") else set()
    assert {name for name, on in status.trims.items() if not on} == unproven
    targets = [point.target.rpartition("_fully_shard.")[2] for point in status.patched]
    for name in ("unshard", "wait_for_unshard"):
        assert f"_fsdp_param_group.FSDPParamGroup.{name}" in targets
    assert {"_fsdp_param_group.foreach_reduce", "_fsdp_collectives.foreach_reduce"} <= set(targets)
    assert all(point.holds and point.others == () for point in status.patched)
    text = str(status)
    assert f"{fsdp_skip1.__version__}, on: enable() was called" in text
    assert "(this version knows 2.6 to " in text
    assert "zero copy   yes" in text
    assert json.loads(json.dumps(status.to_dict()))["patched"][0]["holds"] is True

    os.environ["FSDP_SKIP1_TRIMS"] = "ranges"
    fsdp_skip1.enable(zero_copy=False)
    status = fsdp_skip1.status()
    assert not status.zero_copy
    assert "zero copy   no" in str(status)
    assert [name for name, on in status.trims.items() if on] == ["ranges"]
    assert status.variables == {"FSDP_SKIP1_TRIMS": "ranges"}

    fsdp_skip1.disable()
    status = fsdp_skip1.status()
    assert not status.on
    assert status.patched == ()
    assert status.reduction is None
    assert "off: disable() was called" in str(status)


def test_status_without_torch():
    code = """
        import sys, fsdp_skip1
        status = fsdp_skip1.status()
        assert status.on and status.waiting and status.torch == "not imported", status
        assert "it waits for torch's FSDP2 to be imported" in str(status)
        assert status.why == "the package was imported" and status.patched == ()
        fsdp_skip1.disable()
        assert "off: disable() was called" in str(fsdp_skip1.status())
        assert fsdp_skip1.stats().all_gathers == 0
        status.to_dict(), str(fsdp_skip1.stats())
        assert "torch" not in sys.modules and "wrapt" not in sys.modules
    """
    python(code)
    done = python(
        code.replace("import sys", "import sys, fsdp_skip1.report"), FSDP_SKIP1="0", ok=False
    )
    assert "the variable FSDP_SKIP1 forbids it" in done.stderr


@in_ranks()
def test_stats_count_from_enabling(rank):
    module = stack()
    step(module)
    stats = fsdp_skip1.stats()
    assert (stats.all_gathers, stats.reduce_scatters) == (5, 3)  # the root stays unsharded
    assert stats.all_gather_bytes == 4 * (HEAD + 4 * BLOCK)
    assert stats.reduce_scatter_bytes == 4 * (HEAD + 2 * BLOCK)
    assert (stats.shared, stats.copied) == (22, 0)
    assert str(stats).startswith("skipped 5 all-gathers (")
    assert json.loads(json.dumps(stats.to_dict())) == vars(stats)
    fsdp_skip1.disable()
    step(module)
    assert fsdp_skip1.stats() == stats
    fsdp_skip1.enable(zero_copy=False)
    assert fsdp_skip1.stats().all_gathers == 0
    step(module)
    assert (fsdp_skip1.stats().shared, fsdp_skip1.stats().copied) == (0, 22)


# --- the log ----------------------------------------------------------------------------------


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append((record.levelname, record.getMessage()))


@in_ranks(2)
def test_one_line_at_activation_and_one_at_the_first_forward(rank):
    lines, logger = Lines(), logging.getLogger("fsdp_skip1")
    fsdp_skip1.disable()
    fsdp_skip1.notices._said.clear()  # this process has announced nothing
    logger.addHandler(lines)
    logger.setLevel("DEBUG")
    fsdp_skip1.enable()
    level = "INFO" if rank.rank == 0 else "DEBUG"
    assert lines.seen == [(level, f"on: torch {torch.__version__}, zero_copy=True")]
    lines.seen.clear()
    module = stack(mesh(2, 1), inner={"mp_policy": MIXED})
    explanation = fsdp_skip1.explain(module)
    step(module)
    step(module)
    forwards = [line for line in lines.seen if "first forward" in line[1]]
    assert len(forwards) == 1
    assert forwards[0][0] == level
    size = f"{4 * (HEAD + 2 * BLOCK) / 1024:.1f} KiB"
    text = forwards[0][1]
    assert f"first forward of FSDPStack: 3 groups, 12 parameters, {size}: 2 shared (" in text
    assert "), 10 cast (" in text
    assert f"a step saves {explanation.totals()['launches_saved']} launches" in text
    # Whoever switches back and forth is not told each time.
    for _ in range(2):
        lines.seen.clear()
        with fsdp_skip1.disabled():
            pass
        step(module)
    assert [name for name, _ in lines.seen] == ["DEBUG", "DEBUG"], lines.seen


@in_ranks()
def test_the_variable_makes_lines_appear_once(rank):
    os.environ["FSDP_SKIP1_LOG"] = "info"
    logging.getLogger().handlers.clear()  # pytest's
    fsdp_skip1.disable()
    fsdp_skip1.notices._said.clear()  # as in a new process
    fsdp_skip1.notices._variable_read = False
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        fsdp_skip1.enable()
        module = nn.Linear(4, 4)
        fully_shard(module, mesh=mesh(1))
        for _ in range(2):
            module(torch.ones(1, 4)).sum().backward()
        fsdp_skip1.disable()
        fsdp_skip1.enable()
    activation, forward, off = stderr.getvalue().splitlines()
    on = f"on: torch {torch.__version__}, zero_copy=True"
    assert activation == f"fsdp_skip1 [rank 0] info: {on}"
    assert forward.startswith(
        "fsdp_skip1 [rank 0] info: first forward of FSDPLinear: 1 group, 2 parameters, 80 B: "
    )
    assert off == "fsdp_skip1 [rank 0] info: off"

    # Another copy of the package finds the handler of the first.
    for name in [name for name in sys.modules if name.partition(".")[0] == "fsdp_skip1"]:
        del sys.modules[name]
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        import fsdp_skip1 as second

    assert second is not fsdp_skip1
    assert stderr.getvalue() == f"fsdp_skip1 [rank 0] info: {on}\n"
    assert len(logging.getLogger("fsdp_skip1").handlers) == 1

    # The program's own set-up takes over, and gives the logger back.
    lines = Lines()
    logging.getLogger().addHandler(lines)
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        second.disable()
        assert lines.seen == [("INFO", "off")]
        assert stderr.getvalue() == ""
        lines.setLevel("ERROR")  # does not hear it
        second.notices.log("warning", "again")
        assert stderr.getvalue() == "fsdp_skip1 [rank 0] warning: again\n"


@in_ranks()
def test_no_handler_and_no_line_by_default(rank):
    fsdp_skip1.notices._variable_read = False  # as in a new process
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        fsdp_skip1.disable()
        fsdp_skip1.enable()
        step(stack())
    assert fsdp_skip1.notices._variable_read
    assert logging.getLogger("fsdp_skip1").handlers == []
    assert logging.getLogger("fsdp_skip1").level == logging.NOTSET
    assert stderr.getvalue() == ""


def test_the_variable_in_a_new_process():
    done = python(
        """
        from fsdp_skip1 import notices
        for level in "debug", "info", "warning": notices.log(level, "%s %d", level, 1)
        """,
        FSDP_SKIP1_LOG=" Info",
        RANK="3",
    )
    said = [f"fsdp_skip1 [rank 3] {level}: {level} 1" for level in ("info", "warning")]
    assert done.stderr.splitlines() == said


def test_a_level_that_does_not_exist():
    done = python(
        """
        from fsdp_skip1 import notices
        notices.log("warning", "heard"); notices.log("info", "unheard")
        import logging
        assert logging.getLogger("fsdp_skip1").handlers == []
        """,
        FSDP_SKIP1_LOG="loud",
    )
    assert done.stderr.count("FSDP_SKIP1_LOG='loud' is ignored: it takes debug, info,") == 1


# --- doctor -----------------------------------------------------------------------------------


def test_doctor_where_the_skip_works():
    done = doctor("--device", "cpu", expected=2 if features.RELEASE < (2, 7) else 0)
    text = done.stdout
    assert f"fsdp_skip1  {fsdp_skip1.__version__}" in text
    assert f"torch       {torch.__version__}" in text
    assert "wrapt       " in text
    assert "on: the package was imported" in text
    if features.RELEASE < (2, 7):
        assert "does not run on CPU (from 2.7 on it does). (exit code 2)" in text
        assert "Traceback" not in text + done.stderr
        return
    lines = text.splitlines()
    (stock,) = [line.split() for line in lines if line.startswith("stock FSDP2")]
    (ours,) = [line.split() for line in lines if line.startswith("with fsdp_skip1")]
    assert ours[-4:] == ["0", "0", "0", "0"]
    assert int(stock[-1]) >= 12
    gathers, scatters = stock[-4:-2]
    assert gathers == ("4" if features.RELEASE < (2, 9) else "0")
    assert scatters == ("2" if features.RELEASE < (2, 10) else "0")
    assert "bit-equal to stock" in text
    assert "skipped 4 all-gathers" in text
    assert lines[-1] == "The skip works on cpu. (exit code 0)"


def test_doctor_where_torch_is_not_understood(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent(
            """
            from wrapt import register_post_import_hook
            def alter(module): del module.FSDPParam.init_unsharded_param
            register_post_import_hook(alter, "torch.distributed.fsdp._fully_shard._fsdp_param")
            """
        )
    )
    done = doctor("--json", "--device", "cpu", expected=2, PYTHONPATH=str(tmp_path))
    verdict = json.loads(done.stdout)["verdict"]
    assert verdict.startswith("the plugin does not work with this torch: ")
    assert "init_unsharded_param" in verdict


STUBS = {
    "missing": ({"torch/__init__.py": "raise ImportError('no torch here')"}, "no torch here"),
    "2.4": (
        {
            "torch/__init__.py": "__version__ = '2.4.0'; from . import cuda, version",
            "torch/version.py": "cuda = None",
            "torch/cuda.py": "is_available = lambda: False",
            "torch/utils/__init__.py": "",
            "torch/utils/_python_dispatch.py": "class TorchDispatchMode: pass",
            "torch/distributed/__init__.py": "",
            "torch/distributed/fsdp.py": "",
        },
        "this torch has no FSDP2 (fully_shard), which lives in torch.distributed.fsdp from 2.6",
    ),
}


def write_stub(directory: Path, kind: str) -> str:
    """Puts a torch of this kind there; returns what the verdict on it ends with."""
    files, expected = STUBS[kind]
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return expected


def test_doctor_where_the_plugin_is_off(tmp_path):
    write_stub(tmp_path, "2.4")
    variables = {"FSDP_SKIP1": "0", "FSDP_SKIP1_TRIMS": "none"}
    done = doctor("--json", expected=1, PYTHONPATH=str(tmp_path), **variables)
    found = json.loads(done.stdout)
    assert found["exit_code"] == 1
    assert found["verdict"] == "the plugin is off: the variable FSDP_SKIP1 forbids it"
    assert found["variables"] == variables
    assert found["status"]["on"] is False
    assert found["versions"]["torch"] == found["status"]["torch"] == "2.4.0"
    assert found["steps"] == []


@pytest.mark.parametrize("kind", STUBS)
def test_doctor_where_torch_is(tmp_path, kind):
    expected = write_stub(tmp_path, kind)
    done = doctor(expected=2, PYTHONPATH=str(tmp_path))
    last = done.stdout.splitlines()[-1]
    assert last.endswith(f"{expected}. (exit code 2)"), done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_autoload_is_told(monkeypatch):
    from fsdp_skip1.doctor import _autoload

    for name in ("FSDP_SKIP1", "TORCH_DEVICE_BACKEND_AUTOLOAD"):
        monkeypatch.delenv(name, raising=False)
    assert _autoload(seen=True) == "`import torch` alone brings the plugin in"
    assert _autoload(seen=False).startswith("entry point registered; with FSDP_SKIP1=1 ")
    monkeypatch.setenv("FSDP_SKIP1", "1")
    assert _autoload(seen=False) == "entry point registered, but `import torch` did not call it"
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from calling it" in _autoload(seen=False)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ())
    assert _autoload(seen=False).startswith("no entry point, ")


def doctor(*arguments: str, expected: int, **variables: str) -> subprocess.CompletedProcess:
    done = run("-m", "fsdp_skip1", "doctor", *arguments, **variables)
    assert done.returncode == expected, done.stdout + done.stderr
    return done


def python(code: str, ok: bool = True, **variables: str) -> subprocess.CompletedProcess:
    done = run("-c", textwrap.dedent(code), **variables)
    assert (done.returncode == 0) is ok, done.stdout + done.stderr
    return done


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FSDP_SKIP1")}
    kept.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    paths = [variables.pop("PYTHONPATH", ""), kept.get("PYTHONPATH", "")]
    paths += [str(ROOT / "src"), str(ROOT / "tests")]
    return subprocess.run(
        [sys.executable, *arguments],
        env={**kept, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **variables},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
