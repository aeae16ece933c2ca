"""Tables and numbers as people read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def aligned(rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> list[str]:
    """Lines of text in which the cells of a column stand below one another."""
    widths = [len(part) for part in columns(rows)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """The longest cell of each column."""
    return [max(column, key=len) for column in zip(*rows)]


def size(number: int) -> str:
    """Bytes in the unit that suits them."""
    if abs(number) < 1000:
        return f"{number} B"
    amount = number / 1024
    for unit in ("KiB", "MiB", "GiB"):
        if abs(amount) < 1000:
            return f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def plural(number: int, word: str) -> str:
    """A number with its word."""
    ending = "" if number == 1 else "es" if word.endswith("ch") else "s"
    return f"{number} {word}{ending}"


def some(names: Sequence[str]) -> str:
    """The first of the names, and how many there are besides."""
    shown = [name or "(model)" for name in names[:3]]
    if len(names) > 3:
        shown.append(f"and {len(names) - 3} more")
    return ", ".join(shown)
