"""What a size-1 mesh costs: plain module, stock FSDP2 and the plugin, side by side in one run.

    fsdp-skip1 bench --model llama --steps 100

Importing this package imports neither torch nor the libraries of the `bench` extra.
"""

from __future__ import annotations

from fsdp_skip1.bench.options import Options, add_arguments, from_namespace
from fsdp_skip1.bench.results import Report

__all__ = ["Options", "Report", "add_arguments", "from_namespace", "run"]


def run(options: Options) -> int:
    """Measure, print and write what the options ask for.

    Args:
        options: What to measure, and where results go.

    Returns:
        An exit code: 0, or 1 if any arm's losses differ from those of its reference, or 2 if the
        measurement could not be made.
    """
    from fsdp_skip1.bench import launch, output

    try:
        output.check(options)
        report = launch.measure(options)
    except BenchError as problem:
        output.complain(str(problem))
        return 2
    output.write(report, options)
    return report.exit_code()


class BenchError(Exception):
    """A measurement that cannot be made; the message says why and what would help."""
