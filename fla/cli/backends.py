# SPDX-License-Identifier: MIT
"""`fla backends list|explain|report`: who can take ops over, who would take a call and why."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from fla.cli._inventory import static_entries
from fla.cli._output import CliError, Output, add_json_option, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="action", metavar="ACTION", title="actions", required=True)

    listing = commands.add_parser("list", help="plugins and the backends they registered")
    listing.add_argument("operation", nargs="?", help="only backends of this operation")
    add_json_option(listing)
    listing.set_defaults(handler=_list)

    explaining = commands.add_parser(
        "explain",
        help="what each candidate says to a call, without running it",
        description="Builds tensors without data in the shapes of the op's parameters and asks every candidate.",
    )
    explaining.add_argument("function", help="e.g. kda.chunk_kda, or just chunk_kda")
    explaining.add_argument("--shape", default="", help="sizes, e.g. B1,T64,H2,HV4,K64,V64; N3 packs three sequences")
    explaining.add_argument("--dtype", default="bfloat16", help="of the activations (default: bfloat16)")
    explaining.add_argument("--device", help="cpu, cuda, xpu ... (default: this machine's accelerator, else cpu)")
    explaining.add_argument("--arg", action="append", default=[], metavar="NAME=VALUE", help="any other argument")
    explaining.add_argument(
        "--tensor", action="append", default=[], metavar="NAME", help="give this optional tensor too"
    )
    explaining.add_argument("--grad", action="store_true", help="the inputs require gradients")
    explaining.add_argument("--pin", metavar="NAME", help="as under use_backend(NAME, strict=True)")
    add_json_option(explaining)
    explaining.set_defaults(handler=_explain)

    reporting = commands.add_parser("report", help="all the framework knows, for a bug report")
    add_json_option(reporting)
    reporting.set_defaults(handler=_report)


def run(args: argparse.Namespace) -> int:
    return int(args.handler(args))


def _list(args: argparse.Namespace) -> int:
    from fla import backends

    _import_ops()
    plugins, rows = backends.list_plugins(), backends.list_backends(args.operation)
    if args.json:
        print_json({"plugins": plugins, "backends": rows})
        return 0
    print_backends(Output(), plugins, rows)
    return 0


def print_backends(out: Output, plugins: list[dict[str, Any]], rows: list[dict[str, Any]]) -> None:
    """The tables of plugins and backends. Shared with `fla doctor`."""
    if plugins:
        out.heading("Plugins")
        out.table(
            ["plugin", "distribution", "version", "state", "load ms", "entry point", "reason"],
            [
                [
                    p["name"],
                    p["distribution"],
                    p["version"],
                    p["state"],
                    _ms(p["load_ms"]),
                    p["entry_point"],
                    p["reason"],
                ]
                for p in plugins
            ],
        )
    else:
        out.line("No plugins are installed: every op runs its core implementation.")
    if rows:
        out.heading("Backends, in the order in which they are asked")
        out.table(
            ["operation", "backend", "priority", "usable", "variable", "functions", "reason"],
            [
                [
                    *(r["operation"], r["backend"], r["priority"], r["usable"], r["env_var"]),
                    *(" ".join(r["functions"]), r["reason"]),
                ]
                for r in rows
            ],
        )


def _ms(value: float | None) -> str | None:
    return None if value is None else f"{value:.1f}"


def _explain(args: argparse.Namespace) -> int:
    import torch

    from fla import backends
    from fla.cli._arguments import build_arguments, find_function, parse_shape, parse_values

    function = find_function(args.function)
    op = getattr(function, "op", None)
    if op is None:
        raise CliError(f"{args.function} is not open to backends, it always runs as it is")
    pin: AbstractContextManager[None] = backends.use_backend(args.pin, strict=True) if args.pin else nullcontext()
    with pin, _tensors_on(args.device, torch) as device:
        arguments = build_arguments(
            function,
            op.operation,
            parse_shape(args.shape),
            dtype=args.dtype,
            device=device,
            values=parse_values(args.arg),
            tensors=args.tensor,
            grad=args.grad,
        )
        _validate(op, arguments)
        found = backends.explain(function, **arguments)
    if args.json:
        print_json(found.to_dict())
        return 0
    out = Output()
    out.line(f"{found.operation}.{found.function} -> {found.chosen or 'nothing: ' + str(found.error)}")
    out.line(f"on {found.facts.device}{', with gradients' if found.facts.backward else ''}\n")
    out.table(
        ["candidate", "verdict", "priority", "reason"],
        [[v.backend, v.code, v.priority, v.reason] for v in found.verdicts],
    )
    out.line(f"\nTraining under torch.compile: {found.compiled_training or 'nothing'}")
    for text in found.plugins:
        out.line(f"plugin {text}", style="yellow")
    return 0


def _validate(op: Any, arguments: dict[str, Any]) -> None:
    """Refuse what the op itself would refuse before anything is selected."""
    if op.validate is None:
        return
    bound = op.signature.bind(**arguments)
    bound.apply_defaults()
    try:
        op.validate(*bound.arguments.values())
    except (ValueError, TypeError, NotImplementedError) as error:
        raise CliError(f"{op.name} refuses this call: {error}") from None


@contextmanager
def _tensors_on(device: str | None, torch: Any) -> Iterator[str]:
    """A block in which tensors without data can be made, and the device to make them on.

    Without a device they are meta tensors, which stand for this machine's accelerator. A named device needs fake
    tensors, which can say that they are on a device that this machine does not have.
    """
    if device is None:
        yield "meta"
        return
    try:
        named = torch.device(device)
    except RuntimeError:
        raise CliError(f"--device {device!r} is no torch device; write cpu, cuda, cuda:1, xpu ...", 2) from None
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        yield str(named)


def _report(args: argparse.Namespace) -> int:
    from fla import backends

    _import_ops()
    report = backends.report()
    if args.json:
        print_json(report)
        return 0
    out = Output()
    out.fields((key, report[key]) for key in ("python", "platform", "torch", "triton"))
    out.fields([("triton drives", ", ".join(report["triton_devices"]) or "nothing")])
    print_backends(out, report["plugins"], report["backends"])
    chosen = [row for row in report["settings"] if row["origin"] != "default"]
    if chosen or report["unrecognised"]:
        from fla.cli.settings import print_settings

        out.heading("Settings that are not at their default")
        print_settings(out, chosen, report["unrecognised"])
    for failure in report["quarantine"]:
        out.line(f"quarantined: {failure}", style="yellow")
    return 0


def _import_ops() -> None:
    for module in op_modules():
        importlib.import_module(module)


def op_modules() -> list[str]:
    """The packages of all ops. Importing them makes the operations known, whose functions a backend may have."""
    return list(dict.fromkeys(entry.module for entry in static_entries(("ops",))))
