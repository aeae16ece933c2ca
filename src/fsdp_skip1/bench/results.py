"""What was measured, as plain data: compared, judged and turned into JSON without torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

FORMAT = 1
"""Version of the JSON file's layout."""


@dataclass
class Spread:
    """A median with its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of one value or more."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(statistics.median(values), low, high)


@dataclass
class Arm:
    """One way to train the model, and what it cost.

    Attributes:
        name: Short name, also in file names.
        title: Name for people.
        reference: Name of the arm whose losses it must repeat to the bit.
        losses: One list a rank, with every step's loss in hexadecimal.
        milliseconds: Each round's median step, forward and backward.
        ratio: Of each round's step to the baseline's of the same round.
        data_ops: Operators beyond the baseline's that touch tensor data, in one step, by name.
        collectives: Collectives in one step, by name.
        allocated: Bytes allocated in one step, beyond the baseline's.
        peak: Peak memory over the step's start, beyond the baseline's.
        failure: Why it could not run, or None.
        bitwise: Whether its losses are its reference's; None where there is none to compare with.
    """

    name: str
    title: str
    reference: str
    losses: list[list[str]] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)
    ratio: Spread | None = None
    data_ops: dict[str, int] = field(default_factory=dict)
    collectives: dict[str, int] = field(default_factory=dict)
    allocated: int = 0
    peak: int = 0
    failure: str | None = None
    bitwise: bool | None = None

    @property
    def stock(self) -> bool:
        """Whether this is torch's own FSDP2."""
        return self.name.endswith("stock")


@dataclass
class Comparison:
    """All arms of one model. The first arm is the baseline.

    Attributes:
        model: Its name.
        parameters: How many numbers it learns.
        tokens: How many each rank is given in a step.
        arms: What was compared.
        cpu_share: CPU time over wall time of the baseline's steps, where it should be 1 or more.
    """

    model: str
    parameters: int
    tokens: int
    arms: list[Arm]
    cpu_share: float | None = None

    @property
    def disturbed(self) -> bool:
        """Whether other processes took so much of the CPU that times say little.

        Worse than noise: arms that sleep now and then, as in a collective, get the CPU back sooner
        than those that never do.
        """
        return self.cpu_share is not None and self.cpu_share < 0.9

    def judge(self) -> None:
        """Compare each arm's losses with its reference's."""
        by_name = {arm.name: arm for arm in self.arms}
        for arm in self.arms:
            reference = by_name[arm.reference]
            if arm.failure is None and reference.failure is None:
                arm.bitwise = same_losses(arm.losses, reference.losses)


@dataclass
class Report:
    """All that one run has found, and where.

    Attributes:
        machine: Versions, and what it ran on.
        options: What was asked for.
        comparisons: One a model.
        wrapper: What the plugin adds to a call of ``unshard`` or ``wait_for_unshard`` on a group
            that is really sharded, in microseconds; None where there is one rank.
    """

    machine: dict[str, str]
    options: dict[str, Any]
    comparisons: list[Comparison]
    wrapper: float | None = None  # microseconds

    def exit_code(self) -> int:
        """1 if any arm's losses differ from its reference's, or it failed; else 0.

        Stock torch may fail: some releases do, on some meshes, and that is worth a table too.
        """
        arms = [arm for comparison in self.comparisons for arm in comparison.arms]
        return int(any(arm.bitwise is False or (arm.failure and not arm.stock) for arm in arms))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"format": FORMAT, **asdict(self)}


def same_losses(ours: list[list[str]], theirs: list[list[str]]) -> bool:
    """Whether two arms' losses agree to the bit. A loss that is not finite shows nothing."""
    finite = all(math.isfinite(float.fromhex(loss)) for rank in ours for loss in rank)
    return bool(ours) and finite and ours == theirs
