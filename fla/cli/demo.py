# SPDX-License-Identifier: MIT
"""`fla demo`: train a small language model on the standard library's source, measure it, and let it talk."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from fla.cli._output import CliError, add_json_option, print_json
from fla.models._index import FAMILIES

_Number = TypeVar("_Number", int, float)

EPILOG = """\
Writes checkpoint/, metrics.json and loss.png into --out. Ctrl-C during training stops it there, saves everything that
exists and exits with code 130; a second Ctrl-C exits at once.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--family",
        choices=[family.model_type for family in FAMILIES],
        default="kda",
        metavar="NAME",
        help=f"family of the model: {', '.join(family.model_type for family in FAMILIES)} (default: kda)",
    )
    parser.add_argument("--seconds", type=_positive, default=90.0, help="how long to train (default: 90)")
    parser.add_argument("--device", default="cpu", help="torch device: cpu, cuda, cuda:1, xpu ... (default: cpu)")
    parser.add_argument("--out", type=Path, default=Path("demo-run"), help="folder to write to (default: demo-run)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, batches and sampling (default: 0)")
    parser.add_argument("--prompt", default="def main(", help='text to continue (default: "def main(")')
    parser.add_argument("--tokens", type=_count, default=400, help="bytes to generate, 0 for none (default: 400)")
    parser.add_argument("--temperature", type=_positive, default=0.7, help="sampling temperature (default: 0.7)")
    parser.add_argument("--text", type=Path, help="train on the *.py files of this folder instead")
    parser.add_argument("--size", choices=("small", "tiny"), default="small", help="tiny is for tests of the command")
    add_json_option(parser)
    parser.epilog = EPILOG


def run(args: argparse.Namespace) -> int:
    # Threads that spin while they wait ruin each other on a machine that has other work: measured on two cores at load
    # 7, a step took 4.6 s, and 0.14 s with this. Read when torch loads its OpenMP.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from fla.cli._demo.run import run_demo

    stream = sys.stderr if args.json else sys.stdout
    try:
        metrics = run_demo(args, stream)
    except FileNotFoundError as error:
        raise CliError(str(error)) from None
    if args.json:
        print_json(metrics)
    return 130 if metrics["interrupted"] else 0


def _number(kind: Callable[[str], _Number], text: str) -> _Number:
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None


def _positive(text: str) -> float:
    value = _number(float, text)
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"must be a finite number above 0, got {text}")
    return value


def _count(text: str) -> int:
    value = _number(int, text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, got {text}")
    return value
