"""Where stock torch is wrong on a shard mesh of size 1, by release.

A scenario that names a fault compares the plugin with the plain module alone on the releases that
have it, and marks its stock arm as a strict xfail: the day a release mends the fault, the suite
says so.
"""

from support.features import RELEASE

_LATEST = (2, 15)

# First and last release that has the fault, as often as it came and went.
FAULTS = {
    # fsdp_post_all_gather gets the first tensor alone (pytorch PR 197999).
    "extension with several tensors": [((2, 9), _LATEST)],
    # Unsharded parameters are made inside inference mode (PRs 197327, 146709).
    "inference mode before training": [((2, 6), _LATEST)],
    "inference mode alone": [((2, 9), (2, 14))],
    # fp16, or a forced sum: divided twice, or (fp16 on gloo, 2.6 and 2.7) not at all.
    "divide factor applied twice": [((2, 6), (2, 7)), ((2, 10), _LATEST)],
    # The same with replicas.
    "divide factor applied twice to replicas": [((2, 6), (2, 7)), ((2, 10), _LATEST)],
    # fp32 on gloo: not applied, or no operator for it (PR 167178).
    "divide factor not applied": [((2, 6), (2, 9))],
    # bf16 parameters reduced in fp32: two dtypes meet in one reduction.
    "gradient that arrives late": [((2, 6), (2, 14))],
}


def fault(name: str) -> bool:
    """Whether this release has the fault."""
    return any(first <= RELEASE <= last for first, last in FAULTS[name])
