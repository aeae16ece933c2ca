"""Where stock torch is wrong on a shard mesh of size 1, by release.

A scenario that names a fault compares the plugin with the plain module alone on these releases,
and marks its stock arm as a strict xfail: the day a release mends the fault, the suite says so.
"""

from support.features import RELEASE


def _from(first, last=(99, 0)):
    return first <= RELEASE <= last


FAULTS = {}


def fault(name: str) -> bool:
    """Whether this release has the fault."""
    return FAULTS[name]
