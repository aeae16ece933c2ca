"""A state machine that tries everything: random models, then random sequences of operations.

``FSDP_SKIP1_MACHINE_STEPS`` says how many steps, about (``tox run -e torch28-long`` asks for more),
and ``FSDP_SKIP1_MACHINE_SEED`` begins elsewhere. A failure prints the shortest sequence that was
found; put it into ``test_machine_faults``.
"""

import math
import os
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from support import features
from support.machine import Judge, Trio
from support.machine_arm import Spec, op

STEPS = int(os.environ.get("FSDP_SKIP1_MACHINE_STEPS", "600"))
SEED = int(os.environ.get("FSDP_SKIP1_MACHINE_SEED", "1"))
_MODELS = min(50, math.ceil(STEPS / 16))  # a test
_LENGTH = 24  # operations a model; some do not apply, and some are many steps
_CHUNK = 1250  # steps of a test, about

FLOATS = ("float32", "bfloat16", "float16")
MESHES = [(1,), (1, 1)] + [()] * features.has("replicate_with_fsdp")
RESHARDS = (True, False, *[None] * features.has("reshard_after_forward=None"))
INTEGERS = ("int",) if features.RELEASE >= (2, 12) else ()  # older releases refuse them
mostly = st.sampled_from((True, True, True, False))
MODES = ("grad", "grad", "no_grad", "inference")


def specs() -> st.SearchStrategy[Spec]:
    choices = {
        "dtype": st.sampled_from(FLOATS),
        "param_dtype": st.sampled_from(("", "", "", "bfloat16", "float16")),
        "reduce_dtype": st.sampled_from(("", "float32", "bfloat16")),
        "output_dtype": st.sampled_from(("", "float32")),
        "dim": st.sampled_from((3, 1, 5)),
        "hidden": st.sampled_from((4, 1, 7)),
        "norm": st.booleans(),
        "dropout": st.booleans(),
        "kind": st.sampled_from(("stack", "shared", "branches")),
        "depth": st.integers(1, 3),
        "tied": st.booleans(),
        "odd": st.sampled_from(("", *INTEGERS, "half", "empty", "unused", "pair")),
        "checkpoint": st.sampled_from(("", "", "inside", "outside", "reentrant")),
        "wrap": st.sampled_from(("blocks", "root", "inner", "grouped", "entry")),
        "mesh": st.sampled_from(MESHES),
        "columns": st.booleans(),
        "reshard": st.sampled_from(RESHARDS),
        "offload": st.booleans(),
        "frozen": st.lists(st.integers(0, 9), max_size=2).map(tuple),
        "optimizer": st.sampled_from(("sgd", "momentum", "adamw", "fused")),
        "foreach": st.booleans(),
        "on": mostly,
        "zero_copy": mostly,
    }
    return st.builds(Spec, **choices).map(_sound)


def _sound(spec: Spec) -> Spec:
    """Without what FSDP2 does not take."""
    if spec.wrap == "entry" and spec.tied:
        spec = replace(spec, tied=False)  # one parameter, two groups
    if spec.odd == "empty":
        spec = replace(spec, columns=False)  # no rows, no columns
    if not spec.param_dtype or spec.wrap == "inner":
        spec = replace(spec, output_dtype="")  # a block would not take what the last one gives
    return spec


SETTERS = (
    ("set_requires_gradient_sync", st.booleans()),
    ("set_requires_all_reduce", st.booleans()),
    ("set_is_last_backward", st.booleans()),
    ("set_reshard_after_backward", st.booleans()),
    ("set_reshard_after_forward", st.booleans()),
    ("set_force_sum_reduction_for_comms", st.booleans()),
    ("set_reduce_scatter_unused_params", st.booleans()),
    ("set_keep_unsharded_storage", st.booleans()),
    ("set_unshard_in_backward", st.booleans()),
    ("_set_unshard_async_op", st.booleans()),
)
setters = st.one_of(
    *(
        st.tuples(st.just(name), values, st.sampled_from((-1, -1, -2, 0, 1)))
        for name, values in SETTERS
    )
)
where = st.sampled_from((-1, 0, 1, 2))
which = st.integers(0, 9)
seeds = st.integers(0, 3)
actions = st.sampled_from(("off", "on", "copy"))


class Machine(RuleBasedStateMachine):
    trio: Trio
    steps: Counter[str]

    def __init__(self) -> None:
        super().__init__()
        self.judge = Judge(self.trio, self.steps)

    @initialize(spec=specs(), first=st.sampled_from(("", "", "no_grad", "inference")))
    def begin(self, spec, first):
        self.judge.begin(spec)
        if first:
            self.judge.do(op.forward(mode=first))

    # - Passes

    # hypothesis favours the rule with the fewest arguments whose name comes first.
    @rule(seed=seeds)
    def a_training_step(self, seed):
        self.judge.do(op.train(seed=seed, active=seed))

    @rule(
        seed=seeds,
        micro=st.integers(2, 3),
        grad_input=st.booleans(),
        without=st.sampled_from(("", "set_requires_gradient_sync", "set_requires_all_reduce")),
    )
    def accumulate(self, seed, micro, grad_input, without):
        if without:
            self.judge.do(op.setter(name=without, value=False))
            self.judge.do(op.forward(seed=seed + 1))
            self.judge.do(op.backward(which=-1))
            self.judge.do(op.setter(name=without, value=True))
        self.judge.do(op.train(seed=seed, micro=micro, grad_input=grad_input))

    @rule(seed=seeds, where=where, grad_input=st.booleans(), active=seeds)
    def there_and_back(self, **arguments):
        self.judge.do(op.forward(**arguments))
        self.judge.do(op.backward(which=-1))

    @rule(
        seed=seeds, where=where, mode=st.sampled_from(MODES), grad_input=st.booleans(), active=seeds
    )
    def forward(self, **arguments):
        self.judge.do(op.forward(**arguments))

    @rule(which=seeds, retain=st.booleans(), both=st.booleans(), create=st.booleans())
    def backward(self, **arguments):
        self.judge.do(op.backward(**arguments))

    @rule(on=st.booleans())
    def evaluate(self, on):
        self.judge.do(op.evaluate(on=on))

    @rule(drops=st.booleans())
    def repeat(self, drops):
        self.judge.do(op.drop() if drops else op.repeat())

    # - Optimizer and gradients

    @rule(zero_grad=st.sampled_from((None, True, False)), steps=st.booleans())
    def optimizer(self, steps, zero_grad):
        if steps:
            self.judge.do(op.step())
        if zero_grad is not None:
            self.judge.do(op.zero_grad(set_to_none=zero_grad))

    @rule(data=st.data())
    def gradients(self, data):
        self.judge.do(
            data.draw(
                st.one_of(
                    st.builds(op.clip, norm=st.just(0.1), foreach=st.booleans()),
                    st.builds(op.scale_grads, factor=st.just(0.5)),
                    st.builds(op.set_grad, which=which, value=st.sampled_from((None, 0.25))),
                    st.builds(op.hold, which=which, what=st.sampled_from(("grad", "state"))),
                    st.builds(op.let_go),
                    st.builds(op.set_optimizer, kind=st.sampled_from(("momentum", "adamw"))),
                )
            )
        )

    @rule(which=which, trains=st.booleans())
    def freeze(self, **arguments):
        self.judge.do(op.freeze(**arguments))

    @rule(which=which)
    def write(self, which):
        self.judge.do(op.write(which=which))

    @rule(which=which, seed=seeds)
    def write_between(self, which, seed):
        """Between forward and backward. FSDP2 does not mind, where the plain module does."""
        self.judge.do(op.forward(seed=seed))
        self.judge.do(op.write(which=which))
        self.judge.do(op.backward(which=-1))

    # - Hooks

    @rule(
        kind=st.sampled_from(("accumulate", "gradient", "module", "output")),
        which=which,
        where=where,
    )
    def hook(self, **arguments):
        self.judge.do(op.hook(**arguments))

    @rule(which=which, removes=st.booleans())
    def step_in_backward(self, which, removes):
        self.judge.do(op.unhook() if removes else op.step_in_backward(which=which))

    @rule(
        where=where,
        moment=st.sampled_from(("forward", "backward", "before", "accumulate")),
        action=st.sampled_from(("raise", "off", "on", "copy", "reshard", "unshard")),
    )
    def plant(self, **arguments):
        self.judge.do(op.plant(**arguments))

    # - FSDP2 by hand

    @rule(where=where, wait=st.sampled_from(("sync", "async", "later", "never")))
    def unshard(self, **arguments):
        self.judge.do(op.unshard(**arguments))

    @rule(where=st.sampled_from((None, -1, 0, 1)))
    def reshard(self, where):
        self.judge.do(op.reshard(where=where))

    @rule(setter=setters)
    def setter(self, setter):
        name, value, target = setter
        self.judge.do(op.setter(name=name, value=value, where=target))

    @rule(kind=st.sampled_from(("forward", "backward")), shift=st.integers(1, 3), on=st.booleans())
    def prefetch(self, **arguments):
        self.judge.do(op.prefetch(**arguments))

    @rule(factor=st.sampled_from((1.0, 4.0)))
    def divide_factor(self, factor):
        self.judge.do(op.divide_factor(factor=factor))

    @rule(what=st.sampled_from(("wait", "reset_iter_state", "all_reduce_hook", "state_dict")))
    def rare(self, what):
        self.judge.do(getattr(op, what)())

    # - State

    @rule(assign=st.booleans(), where=where, trains=st.booleans())
    def load(self, assign, where, trains):
        self.judge.do(op.load(assign=assign, where=where))
        if trains:
            self.judge.do(op.train())

    @rule(
        how=st.sampled_from(("apply", "swap_tensors", "empty")), which=which, trains=st.booleans()
    )
    def swap(self, how, which, trains):
        self.judge.do(op.swap(how=how, which=which))
        if trains:
            self.judge.do(op.train())
            self.judge.do(op.forward())

    @rule(what=st.sampled_from(("state", "optimizer", "child", "deepcopy", "pickle")))
    def duplicate(self, what):
        self.judge.do(op.duplicate(what=what))

    @rule(dtype=st.sampled_from(FLOATS))
    def to(self, dtype):
        self.judge.do(op.to(dtype=dtype))

    # - The switch

    @rule(action=actions, thread=st.booleans())
    def toggle(self, **arguments):
        self.judge.do(op.toggle(**arguments))

    @rule(seed=seeds, actions=st.tuples(actions, actions), where=where, active=seeds)
    def toggle_between(self, seed, actions, where, active):
        """Forward one way, backward the other."""
        self.judge.do(op.toggle(action=actions[0]))
        self.judge.do(op.forward(seed=seed, where=where, active=active))
        self.judge.do(op.toggle(action=actions[1]))
        self.judge.do(op.backward(which=-1))

    @rule(which=which, where=where, action=actions)
    def point_elsewhere(self, which, where, action):
        self.judge.do(op.unshard(where=where))
        self.judge.do(op.point_elsewhere(which=which))
        self.judge.do(op.toggle(action=action))


# Each release has sequences of its own, the same at every run.
_FIRST = 1000 * SEED + 100_000 * features.RELEASE[1]


@pytest.mark.parametrize("number", range(_FIRST, _FIRST + math.ceil(STEPS / _CHUNK)))
def test_random_sequences(number, trio, record_property):
    profile = settings(
        max_examples=_MODELS,
        stateful_step_count=_LENGTH,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )
    steps: Counter[str] = Counter()
    machine = type("Machine", (Machine,), {"trio": trio, "steps": steps})
    run_state_machine_as_test(seed(number)(machine), settings=profile)
    record_property("machine", dict(steps))
