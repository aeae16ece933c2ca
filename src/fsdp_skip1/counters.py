"""Plain counters of what was skipped since the plugin was switched on."""

from __future__ import annotations


class Counters:
    """Integers that the hot path adds to; ``report`` reads them.

    Attributes:
        all_gathers: unshards that issued no all-gather.
        all_gather_bytes: bytes of parameters that were neither gathered nor copied for it.
        reduce_scatters: reductions that issued no reduce-scatter.
        reduce_scatter_bytes: bytes of gradients handed over as they stood.
        shared: parameters unsharded without a copy.
        copied: parameters unsharded by one copy, cast or transfer.
    """

    __slots__ = (
        "all_gather_bytes",
        "all_gathers",
        "copied",
        "reduce_scatter_bytes",
        "reduce_scatters",
        "shared",
    )

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.all_gathers = 0
        self.all_gather_bytes = 0
        self.reduce_scatters = 0
        self.reduce_scatter_bytes = 0
        self.shared = 0
        self.copied = 0

    def as_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in self.__slots__}


counters = Counters()
