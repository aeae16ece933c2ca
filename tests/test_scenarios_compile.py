"""torch.compile over blocks and over the model, and compiled autograd.

Graphs and recompiles are counted by the backend: the plugin may cause no more of them than stock.
"""

import contextlib

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fsdp_skip1
from support import models, shards, warmup
from support.arms import Run, Scenario
from support.results import arm_tests
from support.steps import backward, forward, sgd, update

pytestmark = pytest.mark.scenario

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def counting_backend(run: Run, name: str):
    """The named debugging backend, and a count of the graphs it was given."""
    run.kept["graphs"] = 0

    def backend(graph, inputs):
        run.kept["graphs"] += 1
        if name == "aot_eager":
            from torch._dynamo.backends.debugging import aot_eager

            return aot_eager(graph, inputs)
        return graph.forward

    return backend


def blocks_compiled(name: str, **kwargs):
    """Blocks compiled in place before they are sharded, as trainers do."""

    def shard(run: Run) -> None:
        compile_blocks(name)(run)
        for block in run.module.blocks:
            fully_shard(block, mesh=run.mesh(1), **kwargs)
        fully_shard(run.module, mesh=run.mesh(1), **kwargs)

    return shard


def compile_blocks(name: str):
    def apply(run: Run) -> None:
        backend = counting_backend(run, name)
        for block in run.module.blocks:
            block.compile(backend=backend)

    return apply


def model_compiled(name: str, **kwargs):
    """The whole model compiled after sharding: FSDP2's hooks break the graph."""

    def shard(run: Run) -> None:
        shards.blocks(1, **kwargs)(run)
        compile_model(name)(run)

    return shard


def compile_model(name: str):
    def apply(run: Run) -> None:
        run.forward = torch.compile(run.module, backend=counting_backend(run, name))

    return apply


def growing_batches(run: Run) -> None:
    """Two steps alike, evaluation, then one of another size, which may recompile, and back."""
    run.optimizer = sgd(run.module.parameters())
    for step in range(4):
        backward(run, forward(run, f"step {step}", run.batch(step, 4 + (step == 2), models.DIM)))
        update(run, f"step {step}")
        run.record(f"fsdp/step {step}/graphs", run.kept["graphs"])
        if step == 1:
            with torch.no_grad():
                run.record("eval", run.forward(run.batch(9)))


@contextlib.contextmanager
def compiled_autograd():
    """The graph that it records runs eagerly: no release can compile one with FSDP2's callback."""
    from torch._dynamo import compiled_autograd as module

    enable = getattr(module, "_enable", None) or module.enable
    with enable(lambda graph: graph):
        yield


def under_compiled_autograd(*steps: int):
    """FSDP2 asks at its first forward whether it is on; then the model is torch's own business."""

    def train(run: Run) -> None:
        run.optimizer = sgd(run.module.parameters())
        for step in range(4):
            with compiled_autograd() if step in steps else contextlib.nullcontext():
                backward(run, forward(run, f"step {step}", run.batch(step)))
            update(run, f"step {step}")
        if fsdp_skip1.is_enabled():
            assert (fsdp_skip1.stats().all_gathers == 0) == (0 in steps)

    return train


shallow = models.stack_of(depth=1)

SCENARIOS = [
    Scenario(name="compiled blocks", model=shallow, shard=blocks_compiled("aot_eager"),
             plain=compile_blocks("aot_eager"), steps=growing_batches, timeout=180),
    Scenario(name="compiled blocks, bf16", shard=blocks_compiled("eager", mp_policy=MIXED),
             like_plain=False, steps=growing_batches, timeout=180),
    Scenario(name="compiled model", shard=model_compiled("eager"), plain=compile_model("eager"),
             steps=growing_batches, timeout=180),
    Scenario(name="compiled autograd", model=shallow, shard=shards.blocks(1), size_one=None,
             like_plain=False, steps=under_compiled_autograd(0, 1, 2, 3),
             needs=("recorded compiled autograd",), timeout=180),
    Scenario(name="compiled autograd at first", model=shallow, shard=shards.blocks(1),
             size_one=None, like_plain=False, steps=under_compiled_autograd(0, 1),
             needs=("recorded compiled autograd",), timeout=180),
    Scenario(name="compiled autograd now and then", model=shallow, shard=shards.blocks(1),
             like_plain=False, steps=under_compiled_autograd(1, 2),
             needs=("recorded compiled autograd",), timeout=180),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def compiler():
    """The compiler is imported once, in the parent, and not before it is wanted."""
    warmup.load_compiler()


@arm_tests(SCENARIOS)
def test_scenario(scenario: Scenario, arm: str, ledger) -> None:
    ledger.judge(scenario, arm)
