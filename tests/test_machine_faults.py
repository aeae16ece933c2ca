"""What the state machine has found: each sequence as short as it was found, in all three arms.

A failure of ``test_machine`` prints what goes in here.
"""

import pytest

from support.machine import Judge
from support.machine_arm import Spec, op

FAULTS = {
    "other memory of an unsharded parameter stays the user's when the plugin goes": (
        Spec(),
        op.unshard(where=-1),
        op.point_elsewhere(which=0),
        op.toggle(action="off"),
    ),
    # Found in the plugin with one line changed, and rare enough to be worth a line here.
    "two gradients do not share their memory": (
        Spec(odd="pair"),
        op.forward(),
        op.backward(which=-1),
        op.scale_grads(factor=0.5),
    ),
    "a graph of stock's finds its parameters in backward under the plugin": (
        Spec(on=False),
        op.forward(),
        op.toggle(action="on"),
        op.backward(which=-1),
    ),
    "private buffers made in inference mode can train": (
        Spec(zero_copy=False),
        op.forward(mode="inference"),
        op.train(),
    ),
    "a group that is not to be unsharded in backward stays sharded": (
        Spec(wrap="entry"),
        op.unshard(where=-2),
        op.hook(kind="gradient", which=0),
        op.reshard(),
        op.setter(name="set_unshard_in_backward", value=False, where=-2),
        op.forward(),
        op.backward(which=-1),
    ),
    "new storage is seen at the next forward": (
        Spec(),
        op.forward(),
        op.backward(which=-1),
        op.load(assign=True),
        op.forward(),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault(name, trio):
    judge = Judge(trio)
    judge.play(*FAULTS[name])
    assert not judge.over, "nothing was left to compare with"
