"""The command `fsdp-skip1`. Parses, and leaves torch to the commands that need it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import fsdp_skip1
from fsdp_skip1 import bench


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments without the program's name; None means those of this process.

    Returns:
        The exit code.
    """
    args = _parser().parse_args(argv)
    code: int = args.run(args)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fsdp-skip1", description=fsdp_skip1.__doc__)
    parser.add_argument(
        "--version", action="version", version=f"fsdp-skip1 {fsdp_skip1.__version__}"
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    # Each command adds its parser here, and sets `run` to what takes the arguments and returns the
    # exit code.
    _add_bench(commands)
    return parser


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "time the plain module, stock FSDP2 and the plugin side by side"
    parser = commands.add_parser(
        "bench",
        help=text,
        description=f"{text[0].upper()}{text[1:]}, and compare their losses to the bit. "
        "Needs no GPU and no torchrun.",
        epilog="exit code: 0, or 1 if losses differ, or 2 if the measurement cannot be made",
    )
    bench.add_arguments(parser)
    parser.set_defaults(run=lambda args: bench.run(bench.from_namespace(args)))
