"""Tables, progress, plots and JSON. What needs the `bench` extra says so when it is missing."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_skip1.bench import BenchError

if TYPE_CHECKING:
    from fsdp_skip1.bench.options import Options
    from fsdp_skip1.bench.results import Arm, Comparison, Report

EXTRA = 'pip install "fsdp-skip1[bench]"'
PLOTS = (".png", ".svg")

COLUMNS = ("arm", "step", "ratio", "data ops", "comms", "bytes", "peak", "losses")


def check(options: Options) -> None:
    """Find out now, not after minutes of measuring, that results cannot be written.

    Raises:
        BenchError: If a library is missing, or a plot's format is unknown.
    """
    if options.table == "pretty" and not _has("rich"):
        raise BenchError(f"--table pretty needs rich: {EXTRA}")
    if options.plot is not None:
        if options.plot.suffix.lower() not in PLOTS:
            raise BenchError(f"--plot writes {' or '.join(PLOTS)}, not {options.plot.name}")
        if not _has("matplotlib"):
            raise BenchError(f"--plot needs matplotlib: {EXTRA}")
    for file in (options.json, options.plot):
        if file is not None and not file.absolute().parent.is_dir():
            raise BenchError(f"there is no folder {file.parent} to write {file.name} into")


def complain(message: str) -> None:
    """Say why there is no result."""
    print(f"fsdp-skip1 bench: {message}", file=sys.stderr)


def write(report: Report, options: Options) -> None:
    """Print the tables, and write the files that were asked for."""
    pretty = options.table == "pretty" or (options.table == "auto" and _has("rich"))
    for comparison in report.comparisons:
        title = _title(report, comparison)
        if pretty:
            _pretty_table(title, comparison)
        else:
            print(f"\n{title}\n\n{plain_table(comparison)}\n")
    print(_legend(report))
    if report.wrapper is not None:
        print(
            f"Wrapper: {report.wrapper:.1f} us a call beyond stock's, on a group of shard size "
            f"{report.options['nproc']}, which is left to torch."
        )
    if not pretty and sys.stdout.isatty():
        print(f"A table in colour, and plots: {EXTRA}")
    if options.json is not None:
        options.json.write_text(json.dumps(report.to_dict(), indent=1) + "\n")
        print(f"Numbers: {options.json}")
    if options.plot is not None:
        plot(report, options.plot)
        print(f"Plot: {options.plot}")
    if options.trace is not None:
        print(f"Traces, to open in https://ui.perfetto.dev: {options.trace}")


@contextmanager
def progress(turns: int, *, show: bool) -> Iterator[Callable[[str], None]]:
    """A progress bar on the terminal, if there is one; yields what moves it on."""
    if not (show and sys.stderr.isatty()):
        yield lambda _: None
    elif _has("rich"):
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("building", total=turns)
            yield lambda label: bar.update(task, advance=1, description=label)
    else:
        done = 0

        def advance(label: str) -> None:
            nonlocal done
            done += 1
            full = 40 * done // turns
            print(f"\r{label:10} [{'#' * full:40}] {done}/{turns}", end="", file=sys.stderr)

        yield advance
        print(f"\r{'':70}\r", end="", file=sys.stderr)


def plain_table(comparison: Comparison) -> str:
    """A table of spaces and dashes."""
    rows = [list(COLUMNS), *(_row(comparison, arm) for arm in comparison.arms)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = []
    for number, row in enumerate(rows):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
        if number == 0:
            lines.append("  ".join("-" * width for width in widths))
    return "\n".join(lines + notes(comparison))


def notes(comparison: Comparison) -> list[str]:
    """What a reader of a table must know beside it."""
    lines = [f"{arm.title}: {arm.failure}" for arm in comparison.arms if arm.failure]
    if comparison.disturbed:
        lines.append(
            f"This machine is busy: the {comparison.arms[0].title} had a CPU for "
            f"{100 * (comparison.cpu_share or 0):.0f} % of the time. Do not trust the ratios."
        )
    return lines


def plot(report: Report, file: Path) -> None:
    """Bars of the step times over the baseline's, with quartiles."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "fsdp-skip1"
    from matplotlib import pyplot as plt

    comparisons = report.comparisons
    arms = [arm.title for arm in comparisons[0].arms[1:]]
    baseline = comparisons[0].arms[0].title
    inches = 8, 1.2 + 0.45 * (len(arms) + 1) * len(comparisons)
    figure, axes = plt.subplots(figsize=inches, layout="constrained")
    height = 0.8 / len(arms)
    for number, title in enumerate(arms):
        for place, comparison in enumerate(comparisons):
            ratio = comparison.arms[1 + number].ratio
            if ratio is None:
                continue
            y = place + height * (number - (len(arms) - 1) / 2)
            label = title if place == 0 else None
            spread = [[ratio.median - ratio.low], [ratio.high - ratio.median]]
            color = f"C{number}"
            axes.barh(y, ratio.median, height * 0.9, xerr=spread, color=color, label=label)
            axes.text(ratio.high, y, f"  {ratio.median:.2f}", va="center")
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(comparisons)), [comparison.model for comparison in comparisons])
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel(f"time of a step, {baseline} = 1 (median and quartiles)")
    axes.set_title(f"torch {report.machine['torch']}, {report.machine['device']}")
    figure.legend(loc="outside lower center", ncols=len(arms), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    metadata = {"Date": None} if file.suffix.lower() == ".svg" else None
    figure.savefig(file, dpi=150, metadata=metadata)
    plt.close(figure)


def _pretty_table(title: str, comparison: Comparison) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for arm in comparison.arms:
        style = "red" if arm.bitwise is False else "bold" if "skip1" in arm.title else None
        table.add_row(*_row(comparison, arm), style=style)
    # Wide enough for any table: one that is cut to fit a terminal or a pipe loses numbers.
    console = Console(width=200)
    console.print(f"\n{title}", style="italic", highlight=False, markup=False)
    console.print(table)
    for line in notes(comparison):
        console.print(line, markup=False, highlight=False)


def _row(comparison: Comparison, arm: Arm) -> list[str]:
    if arm.ratio is None:
        return [arm.title, "cannot run", *[""] * (len(COLUMNS) - 2)]
    baseline = arm is comparison.arms[0]
    milliseconds = sorted(arm.milliseconds)[len(arm.milliseconds) // 2]
    ratio = arm.ratio
    row = [arm.title, f"{milliseconds:.1f} ms"]
    if baseline:
        row += ["1", ""]
    else:
        row.append(f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})")
        row.append(_signed(sum(arm.data_ops.values())))
    row.append(str(sum(arm.collectives.values())))
    row += ["", ""] if baseline else [_bytes(arm.allocated), _bytes(arm.peak)]
    row.append({None: "not compared", True: "bit-equal", False: "DIFFER"}[arm.bitwise])
    return row


def _title(report: Report, comparison: Comparison) -> str:
    options = report.options
    parts = [
        f"{comparison.model}: {comparison.parameters / 1e6:.1f} M parameters",
        f"{comparison.tokens} tokens a step",
        str(options["dtype"]),
    ]
    if options["param_dtype"]:
        parts.append(f"params in {options['param_dtype']}")
    if options["reduce_dtype"]:
        parts.append(f"reduced in {options['reduce_dtype']}")
    if options["offload"]:
        parts.append("offloaded")
    if options["prefetch"]:
        parts.append(f"prefetching {options['prefetch']}")
    if options["nproc"] > 1:
        parts.append(f"{options['nproc']} ranks")
    parts.append(f"{report.machine['device']}, torch {report.machine['torch']}")
    return ", ".join(parts)


def _legend(report: Report) -> str:
    baseline = report.comparisons[0].arms[0].title
    return (
        "Step: forward and backward; the optimizer is not timed.\n"
        f"Ratio: to the {baseline}'s step; median (quartiles) of rounds in which all arms run.\n"
        "Comms: collectives in one step.\n"
        f"Data ops, bytes allocated, peak memory: what one step has beyond the {baseline}."
    )


def _signed(number: int) -> str:
    return f"{number:+d}" if number else "0"


def _bytes(number: int) -> str:
    size = float(number)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:+.0f} {unit}" if size else "0"
        size /= 1024
    return f"{size:+.1f} GiB"


def _has(library: str) -> bool:
    try:
        importlib.import_module(library)
    except ImportError:
        return False
    return True
