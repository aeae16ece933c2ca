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
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault(name, trio):
    judge = Judge(trio)
    judge.play(*FAULTS[name])
    assert not judge.over, "nothing was left to compare with"
