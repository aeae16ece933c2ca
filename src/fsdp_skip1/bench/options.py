"""The options of `fsdp-skip1 bench`. Imports nothing heavy, for --help's sake."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

MODELS = ("mlp", "llama-768", "llama-512", "llama-256", "llama-64")
"""Each model that can be measured; bench/models.py says what they are."""

GROUPS = {"llama": ("llama-768", "llama-256", "llama-64")}
"""A name for several of them."""

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Options:
    """What to measure, and where results go. Fields are the command's options."""

    model: tuple[str, ...] = ("llama-256",)
    device: str = "cpu"
    dtype: str = "float32"
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    offload: bool = False
    prefetch: int = 0
    steps: int = 50
    threads: int = 1
    nproc: int = 1
    table: str = "auto"
    json: Path | None = None
    plot: Path | None = None
    trace: Path | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bench` to a parser."""
    default = Options()
    parser.add_argument(
        "--model",
        nargs="+",
        choices=(*MODELS, *GROUPS),
        default=list(default.model),
        metavar="MODEL",
        help=f"what to train: {', '.join(MODELS)}; llama is short for {', '.join(GROUPS['llama'])} "
        "(llama-256)",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default.device)
    parser.add_argument(
        "--dtype", choices=DTYPES, default=default.dtype, help="dtype of the parameters"
    )
    parser.add_argument(
        "--param-dtype", choices=DTYPES, help="mixed precision: dtype to compute in"
    )
    parser.add_argument(
        "--reduce-dtype", choices=DTYPES, help="mixed precision: dtype to reduce gradients in"
    )
    parser.add_argument(
        "--offload", action="store_true", help="keep parameters in CPU memory (CPUOffloadPolicy)"
    )
    parser.add_argument(
        "--prefetch",
        type=_natural,
        default=default.prefetch,
        metavar="DEPTH",
        help="prefetch so many blocks ahead, explicitly, in forward and backward (%(default)s: as "
        "FSDP2 does by itself)",
    )
    parser.add_argument(
        "--steps",
        type=_positive,
        default=default.steps,
        help="timed steps of each arm (%(default)s)",
    )
    parser.add_argument(
        "--threads",
        type=_positive,
        default=default.threads,
        help="CPU threads a rank (%(default)s)",
    )
    parser.add_argument(
        "--nproc",
        type=_positive,
        default=default.nproc,
        help="ranks, which this command starts itself; from 2 on, an (N, 1) mesh and replicate() "
        "are compared with DistributedDataParallel (%(default)s)",
    )
    parser.add_argument(
        "--table",
        choices=("auto", "pretty", "plain"),
        default=default.table,
        help="auto is pretty where rich is installed",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw step times, PNG or SVG")
    parser.add_argument(
        "--trace", type=Path, metavar="DIR", help="write a profiler trace of each arm, for Perfetto"
    )


def from_namespace(args: argparse.Namespace) -> Options:
    """Read what `add_arguments` has parsed."""
    models = [name for given in args.model for name in GROUPS.get(given, (given,))]
    return Options(
        model=tuple(dict.fromkeys(models)),
        device=args.device,
        dtype=args.dtype,
        param_dtype=args.param_dtype,
        reduce_dtype=args.reduce_dtype,
        offload=args.offload,
        prefetch=args.prefetch,
        steps=args.steps,
        threads=args.threads,
        nproc=args.nproc,
        table=args.table,
        json=args.json,
        plot=args.plot,
        trace=args.trace,
    )


def _natural(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is negative")
    return number


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number
