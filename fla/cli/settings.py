# SPDX-License-Identifier: MIT
"""`fla settings`: every FLA_* variable with its value, default and where the value came from."""

from __future__ import annotations

import argparse
from typing import Any

from fla import settings
from fla.cli._output import CliError, Output, add_json_option, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these variables (default: all)")
    parser.add_argument("--plugins", action="store_true", help="import installed plugins, to list their variables too")
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    if args.plugins:
        from fla import backends

        backends.refresh()
    rows = settings.describe()
    wanted = [name.upper() for name in args.names]
    for name in wanted:
        try:
            settings.origin(name)
        except KeyError as error:
            raise CliError(error.args[0]) from None
    rows = [row for row in rows if not wanted or row["name"] in wanted]
    unknown = {} if wanted else settings.unrecognised()
    if args.json:
        print_json({"settings": rows, "unknown": unknown})
        return 0
    out = Output()
    if wanted:
        for row in rows:
            out.heading(row["name"])
            out.fields((key, shown(row[key])) for key in ("value", "default", "origin", "allowed", "read", "owner"))
            out.line(f"  {row['meaning']}")
        return 0
    print_settings(out, rows, unknown)
    return 0


def print_settings(out: Output, rows: list[dict[str, Any]], unknown: dict[str, str]) -> None:
    """The table of settings and a line for each variable that means nothing here. Shared with `fla doctor`."""
    out.table(
        ["variable", "value", "default", "origin", "allowed"],
        [[r["name"], shown(r["value"]), shown(r["default"]), r["origin"], r["allowed"]] for r in rows],
    )
    for message in unknown.values():
        out.line(f"warning: {message}", style="yellow")


def shown(value: Any) -> str:
    """A setting's value as the command line prints it."""
    if isinstance(value, list):
        return ",".join(value) or "(empty)"
    if isinstance(value, bool):
        return "on" if value else "off"
    return "(unset)" if value is None else str(value)
