# SPDX-License-Identifier: MIT
"""`fla smoke`: build and run every op and every model family at a tiny size."""

from __future__ import annotations

import argparse
from typing import Any

from fla.cli._output import CliError, Output, add_json_option, print_json

FAILED = 1
NO_DEVICE = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--list", action="store_true", help="print the items and run nothing")
    parser.add_argument("--only", metavar="NAME", nargs="+", default=[], help="items to run, e.g. kda or ops/kda")
    parser.add_argument("--device", default="cpu", help="torch device, or auto for an accelerator (default: cpu)")
    parser.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16", "float64"), default="float32", help="default: float32"
    )
    add_json_option(parser)
    parser.epilog = "Exit codes: 0 nothing failed, 1 something failed, 3 the device is absent."


def run(args: argparse.Namespace) -> int:
    from fla.cli import _checks
    from fla.cli._devices import usable_device

    items = _select(_checks.items(), args.only)
    if args.list:
        if args.json:
            print_json(items)
        else:
            print("\n".join(items))
        return 0
    device = usable_device(args.device)
    results = []
    for item in items:
        results.append(_checks.run_item(item, device, args.dtype))
        if not args.json and results[-1].status == "fail":
            Output().line(f"{item}: {results[-1].detail}", style="red")
    failed = [r for r in results if r.status == "fail"]
    if args.json:
        print_json(
            {"device": str(device), "dtype": args.dtype, "ok": not failed, "items": [r.as_dict() for r in results]}
        )
    else:
        _print(results, str(device), args.dtype)
    return FAILED if failed else 0


def _select(items: list[str], wanted: list[str]) -> list[str]:
    """The wanted items; a name without its kind stands for every kind."""
    chosen = [item for item in items if not wanted or item in wanted or item.partition("/")[2] in wanted]
    known = {*items, *(item.partition("/")[2] for item in items)}
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise CliError(f"--only: no item is called {', '.join(unknown)}; `fla smoke --list` lists them")
    return chosen


def _print(results: list[Any], device: str, dtype: str) -> None:
    out = Output()
    out.table(
        ["item", "status", "steps", "seconds", "detail"],
        [[r.item, r.status, " ".join(r.steps), f"{r.seconds:.2f}", r.detail] for r in results],
    )
    failed = sum(r.status == "fail" for r in results)
    out.line(f"{len(results) - failed} of {len(results)} items are fine on {device} in {dtype}.")
