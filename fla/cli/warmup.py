# SPDX-License-Identifier: MIT
"""`fla warmup`: compile the kernels of ops before the first call needs them."""

from __future__ import annotations

import argparse
import os
from typing import Any

from fla.cli._output import CliError, Output, add_json_option, print_json

FAILED = 1
NO_DEVICE = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "op", nargs="*", help="kda, kda.chunk_kda or chunk_kda (default: every function with a Triton path)"
    )
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"], metavar="D", help="of q, k, v (default: bfloat16)")
    parser.add_argument(
        "--head-dim", nargs="+", default=["128"], metavar="K", help="64, or 64x128 for K and V apart (default: 128)"
    )
    parser.add_argument("--group", type=int, nargs="+", default=[1], metavar="G", help="value heads per key head")
    parser.add_argument("--form", nargs="+", default=[], help="forms of the call (default: all; --list names them)")
    parser.add_argument("--arg", action="append", default=[], metavar="NAME=VALUE", help="a flag of every call")
    parser.add_argument("--gates", choices=("both", "float32", "same"), default="both", help="dtype of ready gates")
    parser.add_argument("--inference", action="store_true", help="no backward passes")
    parser.add_argument("--device", default="auto", help="torch device (default: the first accelerator)")
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="processes that compile (default: one per core, at most 8)"
    )
    parser.add_argument("--list", action="store_true", help="print the functions and forms, and run nothing")
    add_json_option(parser)
    parser.epilog = (
        "Kernels land in Triton's cache on disk (TRITON_CACHE_DIR). "
        "Exit codes: 0 all is compiled, 1 something failed, 3 no device that Triton drives."
    )


def run(args: argparse.Namespace) -> int:
    from fla.cli import _warm
    from fla.cli._arguments import parse_values

    tasks = _warm.tasks(
        args.op,
        dtypes=args.dtype,
        dims=args.head_dim,
        groups=args.group,
        forms=args.form,
        flags=parse_values(args.arg),
        gates=args.gates,
        backward=not args.inference,
    )
    if args.list:
        return _list(tasks, args.json)
    from fla.backends.devices import has_triton_driver
    from fla.cli._devices import usable_device

    device = usable_device(args.device)
    if not has_triton_driver(device.type):
        raise CliError(
            f"Triton has no driver for {device.type} on this machine: there is nothing to compile", NO_DEVICE
        )
    if args.jobs is not None and args.jobs < 1:
        raise CliError(f"--jobs must be at least 1, got {args.jobs}", 2)
    jobs = args.jobs or min(os.cpu_count() or 1, 8)
    out = Output()

    def tell(result: Any) -> None:
        if not args.json:
            out.line(f"{result.task}: {result.calls} calls, {result.seconds:.1f} s{_problem(result)}")

    before = _warm.cached_kernels()
    results = _warm.run_tasks(tasks, str(device), jobs, tell)
    new = len(_warm.cached_kernels() - before)
    failed = [r for r in results if r.error]
    if args.json:
        print_json(
            {"device": str(device), "ok": not failed, "new_kernels": new, "tasks": [r.as_dict() for r in results]}
        )
    else:
        out.line(
            f"{new} new kernels in {_warm.cache_folder()}; {len(results) - len(failed)} of {len(results)} forms ready."
        )
    return FAILED if failed else 0


def _problem(result: Any) -> str:
    if result.error:
        return f", FAILED: {result.error}"
    return f", not on Triton: {result.refused}" if result.refused else ""


def _list(tasks: list[Any], as_json: bool) -> int:
    names = list(dict.fromkeys((task.function, task.form) for task in tasks))
    if as_json:
        print_json([{"function": function, "form": form} for function, form in names])
    else:
        Output().table(["function", "form"], [list(row) for row in names])
    return 0
