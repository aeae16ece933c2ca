"""The command `fsdp-skip1`. Parses, and leaves torch to the commands that need it."""

from __future__ import annotations

import argparse
import json
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
    _add_doctor(commands)
    _add_bench(commands)
    return parser


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "see whether the skip works here; the output is what a bug report needs"
    parser = commands.add_parser(
        "doctor",
        help=text,
        description="Show the installation and the plugin's status, and run one training step of "
        "two layers in a fresh process, with the plugin and without.",
        epilog="exit code: 0 if the skip works, 1 if the plugin is off, 2 if it cannot work here: "
        "torch is missing, has no FSDP2, or is not understood",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="only this one")
    parser.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    from fsdp_skip1.doctor import diagnose

    found = diagnose(args.device)
    print(json.dumps(found.to_dict(), indent=1) if args.json else found)
    return found.exit_code


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
