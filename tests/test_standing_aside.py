"""A torch that the plugin does not understand: one warning, and torch runs as it is."""

import ast
import os
import re
import time

import pytest
from support import altered, warmup
from support.altered import Alteration, Heard, find, renamed, replaced, transformed
from support.ranks import Rank, run_ranks

GROUP, PARAM, STATE = "_fsdp_param_group", "_fsdp_param", "_fsdp_state"
COLLECTIVES, COMMON = "_fsdp_collectives", "_fsdp_common"


def parameter_added(where: str, function: str, parameter: str) -> altered.Edit:
    """Before the signature's closing bracket, on one line or several."""
    return replaced(
        where, rf"(def {function}\((?:[^()]|\([^()]*\))*?),?\s*\)( ->|:)", rf"\1, {parameter})\2"
    )


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
            def visit_Attribute(self, node):  # noqa: N802
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
    Alteration("parameter added", (parameter_added(GROUP, "unshard", "priority: int = 0"),),
               says=("unshard(self, async_op, priority)", "unshard(self, async_op)")),
    Alteration("parameter added to wait", (parameter_added(GROUP, "wait_for_unshard", "stream=None"),),
               says=("wait_for_unshard(self, stream)", "wait_for_unshard(self)")),
    Alteration("parameter renamed", (
        replaced(GROUP, r"(def unshard\(self, )async_op", r"\1in_background"),
        replaced(GROUP, r"(?s)(def unshard\(self, in_background.*?\n    def )",
                 lambda found: re.sub(r"\basync_op\b", "in_background", found[0])),
    ), says=("unshard(self, in_background)", "unshard(self, async_op)")),
    Alteration("parameter of a parameter's method added",
               (parameter_added(PARAM, "alloc_all_gather_outputs", "pool=None"),),
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
    Alteration("another field", (
        replaced(COLLECTIVES, r"(    all_gather_input_split_sizes: .*\n)", r"\1    padding: int = 0\n"),
    ), says=("AllGatherResult with fields", "padding", "the fields ('all_gather_output'")),
    Alteration("member gone", (renamed("UNSHARDED", "WHOLE"),),
               says=("no UNSHARDED in ShardedState", "ShardedState.UNSHARDED")),
    Alteration("training state gone", (renamed("PRE_BACKWARD", "BEFORE_BACKWARD"),),
               says=("no PRE_BACKWARD in TrainingState", "TrainingState.PRE_BACKWARD")),
    Alteration("reduction renamed", (renamed("foreach_reduce", "reduce_gradients"),),
               says=("no foreach_reduce", "foreach_reduce")),
    Alteration("reduction with an unknown parameter",
               (parameter_added(COLLECTIVES, "foreach_reduce", "compress: bool = False"),),
               says=("foreach_reduce with an unknown compress", "the parameters of torch 2.6")),
    Alteration("reduction without a parameter", (renamed("partial_reduce_output", "partial_sum"),),
               says=("foreach_reduce without partial_reduce_output", "with an unknown partial_sum")),
    Alteration("reduction with another result", (
        transformed(COLLECTIVES, _another_result), transformed(GROUP, _another_target),
    ), says=("foreach_reduce with", "results", "6 or 7 results")),
    Alteration("reduction with another result, annotated as before", (
        transformed(COLLECTIVES, _another_result_unannotated), transformed(GROUP, _another_target),
    ), says=("foreach_reduce with", "results", "6 or 7 results")),
    Alteration("division with an unknown parameter", (
        parameter_added(COLLECTIVES, "_get_gradient_divide_factors", "schedule: str = ''"),
    ), says=("_get_gradient_divide_factors with an unknown schedule",)),
]  # fmt: skip


@pytest.fixture(scope="module")
def stock_losses():
    warmup.load()
    return run_ranks(lambda rank: altered.train(), 1)[0]


def understands(alteration: Alteration) -> dict:
    altered.put_in_place(alteration)
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
    (found,) = run_ranks(lambda rank: understands(alteration), 1)
    assert found["heard"] == []
    assert found["on"] is True
    assert found["losses"] == stock_losses
    assert found["skipped"] > 0
    assert found["left"] == []
