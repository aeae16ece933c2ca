"""A torch that the plugin does not understand: one warning, and torch runs as it is."""

import ast
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from support import altered
from support.altered import Alteration, Heard, find, renamed, replaced, transformed
from support.ranks import Rank, run_ranks

GROUP, PARAM, STATE = "_fsdp_param_group", "_fsdp_param", "_fsdp_state"
COLLECTIVES, COMMON = "_fsdp_collectives", "_fsdp_common"


def parameter_added(where: str, function: str, parameter: str) -> altered.Edit:
    def add(tree: ast.Module) -> None:
        arguments = find(tree, ast.FunctionDef, function).args
        arguments.args.append(ast.arg(parameter))
        arguments.defaults.append(ast.Constant(None))

    return transformed(where, add)


def _another_field(tree: ast.Module) -> None:
    field = ast.parse("padding: int = 0").body[0]
    find(tree, ast.ClassDef, "AllGatherResult").body.append(field)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and getattr(node.value, "id", "") == "all_gather_result":
            node.targets[0].elts.append(ast.Name("_", ast.Store()))


def _another_result(tree: ast.Module) -> None:
    """``foreach_reduce`` gives back one item more."""
    function = find(tree, ast.FunctionDef, "foreach_reduce")
    function.returns.slice.elts.append(ast.Name("object"))
    for node in ast.walk(function):
        if isinstance(node, ast.Return):
            node.value.elts.append(ast.Constant(None))


def _another_result_unannotated(tree: ast.Module) -> None:
    annotation = find(tree, ast.FunctionDef, "foreach_reduce").returns
    before = ast.unparse(annotation)
    _another_result(tree)
    find(tree, ast.FunctionDef, "foreach_reduce").returns = ast.parse(before, mode="eval").body


def _another_target(tree: ast.Module) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            if getattr(node.value.func, "id", "") == "foreach_reduce":
                node.targets[0].elts.append(ast.Name("_", ast.Store()))


def _inherited(tree: ast.Module) -> None:
    """The methods that are replaced come from a base class."""
    cls = find(tree, ast.ClassDef, "FSDPParamGroup")
    moved = [n for n in cls.body if getattr(n, "name", "") in ("unshard", "wait_for_unshard")]
    cls.body = [n for n in cls.body if n not in moved]
    cls.bases = [ast.Name("_Base", ast.Load())]
    base = ast.ClassDef(name="_Base", bases=[], keywords=[], body=moved, decorator_list=[])
    if "type_params" in ast.ClassDef._fields:  # Python 3.12+
        base.type_params = []
    tree.body.insert(tree.body.index(cls), base)


def _annotations_as_text(tree: ast.Module) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.returns is not None:
            node.returns = ast.Constant(ast.unparse(node.returns))


def _property_as_method(name: str):
    """A property turned into a method, and its uses into calls."""

    def transform(tree: ast.Module) -> None:
        class Calls(ast.NodeTransformer):
            def visit_Attribute(self, node):
                self.generic_visit(node)
                return ast.Call(node, [], []) if node.attr == name else node

        Calls().visit(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name == name:
                node.decorator_list.clear()

    return tuple(transformed(where, transform) for where in (GROUP, PARAM, STATE, COLLECTIVES))


UNDERSTOOD = [
    Alteration("unaltered"),
    Alteration("methods inherited", (transformed(GROUP, _inherited),)),
    Alteration("annotations as text", (transformed(COLLECTIVES, _annotations_as_text),)),
]
NOT_UNDERSTOOD = [
    Alteration("FSDP2 missing", missing=True, edits=(
        replaced("__init__", r"from \._fully_shard import \([^)]*\)", "class _Gone: pass"),
        replaced("__init__", r"(?m)^(\w+)\.__module__ = .*$", ""),
    ), says=("has no torch.distributed.fsdp._fully_shard",)),
    Alteration("module gone", (renamed(COLLECTIVES, "_collectives"),), {COLLECTIVES: "_collectives"},
               says=(f"no module {altered.FSDP2}.{COLLECTIVES}", "FSDP2 of torch 2.6")),
    Alteration("class renamed", (renamed("FSDPParamGroup", "ParamGroup"),),
               says=("no FSDPParamGroup", f"{GROUP}.FSDPParamGroup")),
    Alteration("method renamed", (renamed("wait_for_unshard", "finish_unshard"),),
               says=("no wait_for_unshard", "FSDPParamGroup.wait_for_unshard")),
    Alteration("method of a parameter renamed",
               (renamed("init_unsharded_param", "make_unsharded_param"),),
               says=("no init_unsharded_param in FSDPParam", "FSDPParam.init_unsharded_param")),
    Alteration("hook renamed", (renamed("_root_pre_forward", "_root_forward_pre"),),
               says=("no _root_pre_forward", "FSDPState._root_pre_forward")),
    Alteration("parameter added", (parameter_added(GROUP, "unshard", "priority"),),
               says=("unshard(self, async_op, priority)", "unshard(self, async_op)")),
    Alteration("parameter added to wait", (parameter_added(GROUP, "wait_for_unshard", "stream"),),
               says=("wait_for_unshard(self, stream)", "wait_for_unshard(self)")),
    Alteration("parameter renamed", (
        replaced(GROUP, r"(def unshard\(self, )async_op", r"\1in_background"),
        replaced(GROUP, r"(?s)(def unshard\(self, in_background.*?\n    def )",
                 lambda found: re.sub(r"\basync_op\b", "in_background", found[0])),
    ), says=("unshard(self, in_background)", "unshard(self, async_op)")),
    Alteration("parameter of a parameter's method added",
               (parameter_added(PARAM, "alloc_all_gather_outputs", "pool"),),
               says=("alloc_all_gather_outputs(self, pool)", "alloc_all_gather_outputs(self)")),
    Alteration("property as a method", _property_as_method("is_unsharded"),
               says=("no property is_unsharded", "FSDPParamGroup.is_unsharded")),
    Alteration("attribute of a group gone",
               (renamed("_reshard_after_forward_event", "_reshard_event"),),
               says=("no _reshard_after_forward_event in FSDPParamGroup",
                     "FSDPParamGroup._reshard_after_forward_event")),
    Alteration("attribute of a parameter gone", (renamed("_sharded_param_data", "_flat_shard"),),
               says=("no _sharded_param_data in FSDPParam", "FSDPParam._sharded_param_data")),
    Alteration("attribute of a parameter gone that comes later",
               (renamed("_unsharded_param", "_whole_param"),),
               says=("no _unsharded_param in FSDPParam", "FSDPParam._unsharded_param")),
    Alteration("attribute of a context gone", (renamed("post_optim_event", "optim_event"),),
               says=("no post_optim_event in FSDPStateContext", "FSDPStateContext.post_optim_event")),
    Alteration("attribute of a mesh gone", (renamed("shard_mesh_size", "shard_size"),),
               says=("no shard_mesh_size in FSDPMeshInfo", "FSDPMeshInfo.shard_mesh_size")),
    Alteration("another field", (transformed(COLLECTIVES, _another_field),), says=("AllGatherResult with fields", "padding",
                                             "the fields ('all_gather_output'")),
    Alteration("member gone", (renamed("UNSHARDED", "WHOLE"),),
               says=("no UNSHARDED in ShardedState", "ShardedState.UNSHARDED")),
    Alteration("training state gone", (renamed("PRE_BACKWARD", "BEFORE_BACKWARD"),),
               says=("no PRE_BACKWARD in TrainingState", "TrainingState.PRE_BACKWARD")),
    Alteration("reduction renamed", (renamed("foreach_reduce", "reduce_gradients"),),
               says=("no foreach_reduce", "foreach_reduce")),
    Alteration("reduction with an unknown parameter",
               (parameter_added(COLLECTIVES, "foreach_reduce", "compress"),),
               says=("foreach_reduce with an unknown compress", "the parameters of torch 2.6")),
    Alteration("reduction without a parameter", (renamed("partial_reduce_output", "partial_sum"),),
               says=("foreach_reduce without partial_reduce_output", "with an unknown partial_sum")),
    Alteration("reduction with another result", (
        transformed(COLLECTIVES, _another_result), transformed(GROUP, _another_target),
    ), says=("foreach_reduce with the results", "object", "Event, Tensor")),
    Alteration("reduction with another result, annotated as before", (
        transformed(COLLECTIVES, _another_result_unannotated), transformed(GROUP, _another_target),
    ), says=("in number", "by its annotation", "Event, Tensor")),
    Alteration("division with an unknown parameter", (
        parameter_added(COLLECTIVES, "_get_gradient_divide_factors", "schedule"),
    ), says=("_get_gradient_divide_factors with an unknown schedule",)),
]  # fmt: skip


@pytest.fixture(scope="module")
def stock_losses():
    altered.prepare()
    return run_ranks(lambda rank: altered.train(), 1, fresh=True)[0]


def understands(alteration: Alteration, rank: Rank) -> dict:
    altered.put_in_place(alteration, rank.directory)
    with Heard() as heard:
        import fsdp_skip1
        import torch.distributed.fsdp

        on = fsdp_skip1.enable() and fsdp_skip1.is_enabled()
        losses = altered.train()
        from fsdp_skip1.counters import counters

        skipped = counters.all_gathers
        fsdp_skip1.disable()
    return {
        "on": on,
        "losses": losses,
        "skipped": skipped,
        "heard": heard.all,
        "left": altered.leftovers(),
    }


@pytest.mark.parametrize("alteration", UNDERSTOOD, ids=lambda a: a.name)
def test_understood(alteration: Alteration, stock_losses) -> None:
    (found,) = run_ranks(lambda rank: understands(alteration, rank), 1, fresh=True)
    assert found["heard"] == []
    assert found["on"] is True
    assert found["losses"] == stock_losses
    assert found["skipped"] > 0
    assert found["left"] == []


def stands_aside(alteration: Alteration, order: str, rank: Rank) -> dict:
    """Tries every way in; ``order`` says which comes first, and whether warnings are errors."""
    altered.put_in_place(alteration, rank.directory)
    answers = []
    with Heard(errors="errors" in order) as heard:
        if "hook" in order:
            import fsdp_skip1

            import torch.distributed.fsdp
        else:
            import torch.distributed.fsdp

            import fsdp_skip1
        answers.append(fsdp_skip1.is_enabled())
        answers.append(fsdp_skip1.enable())
        answers.append(fsdp_skip1.enable(zero_copy=False))
        with fsdp_skip1.enabled() as on:
            answers.append(on)
        fsdp_skip1.disable()
        os.environ["FSDP_SKIP1"] = "1"
        import _fsdp_skip1_autoload

        _fsdp_skip1_autoload.autoload()
        answers += [fsdp_skip1.enable(), fsdp_skip1.is_enabled()]
        losses = None if alteration.missing else altered.train()
    return {
        "answers": answers,
        "losses": losses,
        "warnings": heard.warnings,
        "logged": heard.logged,
        "left": altered.leftovers(),
    }


ORDERS = ("hook", "call, errors")


@pytest.mark.parametrize(
    ("alteration", "order"),
    [
        pytest.param(alteration, order, id=f"{alteration.name}, {order}")
        for i, alteration in enumerate(NOT_UNDERSTOOD)
        # Both ways in for the first few, then in turn: what is found does not depend on them.
        for order in (ORDERS if i < 4 else ORDERS[i % 2 :][:1])
    ],
)
def test_not_understood(alteration: Alteration, order: str, stock_losses) -> None:
    (found,) = run_ranks(lambda rank: stands_aside(alteration, order, rank), 1, fresh=True)
    assert not any(found["answers"]), found["answers"]
    heard = found["warnings"] + found["logged"]
    assert len(heard) == 1, heard
    # Where warnings are errors it goes to the log.
    assert len(found["warnings"]) == (0 if "errors" in order else 1)
    for words in alteration.says:
        assert words in heard[0], heard[0]
    if not alteration.missing:
        assert found["losses"] == stock_losses
    assert found["left"] == []


# -- what nobody thought of ---------------------------------------------------------------------

# Names outside the tables of ``releases`` without which it gives up.
ALSO_REQUIRED = {
    "AllGatherResult", "FSDPCommContext", "FSDPMeshInfo", "FSDPParam", "FSDPParamGroup", "FSDPState",
    "FSDPStateContext", "FORWARD", "PRE_BACKWARD", "SHARDED", "ShardedState", "TrainingState",
    "UNSHARDED", "_get_gradient_divide_factors", "_wait_all_gather_streams_on_event",
    "all_gather_inputs", "all_gather_state", "foreach_reduce", "is_unsharded",
    "release_all_gather_state_for_comm_reuse", "shard_mesh_size", "sharded_grad_dtype",
}  # fmt: skip


def mentioned() -> set[str]:
    """Names that our sources use as an attribute or in quotes."""
    import fsdp_skip1

    names = set()
    for file in Path(fsdp_skip1.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)
    return names


def internal() -> set[str]:
    """Names of FSDP2's own: modules' functions and classes, methods, instances' attributes."""
    names = set()
    for file in Path(sys.modules[altered.FSDP2].__file__).parent.glob("_*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
    return names - public()


def public() -> set[str]:
    """Names that code outside FSDP2 knows, so that they cannot change."""
    import inspect

    import torch.distributed.fsdp as fsdp
    import torch.distributed.tensor
    from torch.distributed._composable import contract

    known = [torch, torch.Tensor, torch.nn.Module, torch.autograd.Function, torch.cpu.Stream, dict,
             list, torch.distributed, torch.distributed.ProcessGroup, torch.distributed.DeviceMesh,
             torch.distributed.tensor.DTensor, fsdp, fsdp.FSDPModule, contract]  # fmt: skip
    names = {name for one in known for name in dir(one)}
    for function in (fsdp.fully_shard, fsdp.MixedPrecisionPolicy, fsdp.CPUOffloadPolicy):
        names.update(inspect.signature(function).parameters)
    names |= {"_local_tensor", "_spec", "_fsdp_param_group", "setup_context"}
    return names | {"compiled_autograd_enabled"}


def required() -> set[str]:
    from fsdp_skip1 import releases

    names = set(ALSO_REQUIRED)
    for table in vars(releases).values():
        if isinstance(table, (tuple, frozenset, dict)):
            names.update(name for name in table if isinstance(name, str))
    for signatures in (releases._GROUP_SIGNATURES, releases._PARAM_SIGNATURES):
        names.update(parameter for each in signatures.values() for parameter in each)
    return names | {"module", "event"}  # parameters of signatures that are asked for elsewhere


def renaming(names: list[str]) -> Alteration:
    pattern = re.compile(rf"\b({'|'.join(names)})\b")
    return Alteration("names", (lambda module, source: pattern.sub(r"\1_renamed", source),))


def many_trainings() -> list[list[float]]:
    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return [
        altered.train(),
        altered.train(reshard_after_forward=False),
        altered.train(mp_policy=policy),
        altered.train(offload_policy=CPUOffloadPolicy(pin_memory=False)),
        altered.train(mesh=(1, 1)),
    ]


def test_names_we_do_not_ask_for_may_change() -> None:
    """Whatever name of FSDP2's our sources mention is asked for first, or can be done without."""

    def body(rank: Rank) -> dict:
        stock = many_trainings()
        import fsdp_skip1

        fsdp_skip1.disable()
        names = sorted((mentioned() & internal()) - required())
        altered.put_in_place(renaming(names), rank.directory)
        with Heard() as heard:
            on = fsdp_skip1.enable()
            ours = many_trainings()
            fsdp_skip1.disable()
        return {"names": names, "stock": stock, "on": on, "ours": ours, "heard": heard.all}

    (found,) = run_ranks(body, 1, fresh=True)
    assert len(found["names"]) > 10, found["names"]
    assert found["heard"] == []
    assert found["on"] is True
    assert found["ours"] == found["stock"]


def test_names_we_ask_for_are_asked_for() -> None:
    """The other way round: whatever the tables name is missed when it is gone."""

    def body(rank: Rank) -> list[str]:
        from fsdp_skip1 import releases

        wanted = {
            *releases.GROUP_ATTRIBUTES,
            *releases.PARAM_ATTRIBUTES,
            *releases._PARAM_SIGNATURES,
        }
        passed = []
        for name in sorted(wanted & internal()):
            (rank.directory / name).mkdir()
            altered.put_in_place(renaming([name]), rank.directory / name)
            try:
                releases.read()
                passed.append(name)
            except releases.NotUnderstood as error:
                assert re.search(rf"\b{name}\b", error.expected), error
        return passed

    assert run_ranks(body, 1, fresh=True) == [[]]
