"""Real text that every CPython ships: the topics of its online help, one token a byte."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

VOCABULARY = 256


def text() -> Tensor:
    """All help topics as bytes; where a distribution left them out, the builtins' docstrings."""
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except (ImportError, AttributeError):
        builtins = vars(importlib.import_module("builtins"))
        topics = {name: value.__doc__ or "" for name, value in builtins.items()}
    joined = "\n".join(topics[name] for name in sorted(topics))
    return torch.tensor(list(joined.encode()), dtype=torch.uint8)


class Batches:
    """Batch number n of a rank is the same for every arm, whenever it asks."""

    def __init__(self, batch: int, length: int, rank: int, device: torch.device) -> None:
        self._text = text()
        self._shape = batch, length
        self._rank = rank
        self._device = device

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        """Tokens, and the tokens that follow them."""
        batch, length = self._shape
        generator = torch.Generator().manual_seed(1_000_003 * self._rank + number)
        starts = torch.randint(len(self._text) - length, (batch,), generator=generator).tolist()
        rows = torch.stack([self._text[start : start + length + 1] for start in starts])
        rows = rows.to(self._device, torch.long)
        return rows[:, :-1].contiguous(), rows[:, 1:].flatten()
